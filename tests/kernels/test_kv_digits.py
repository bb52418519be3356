"""Attention over int8 keys and values where queries and weights become whole numbers
(csrc/digits.h): against the formula in double precision, at the edges of 32 bits, and with numbers
that are none."""

import math

import pytest
import torch

from quire.kernels import compiled, kv_types, native_attention
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.coded_linear import quantise_rows

ISAS = [isa for isa in ("avx512_vnni", "avx512_bf16") if isa in compiled.available_isas()]
BLOCK = 8
SEGMENT = 256
FLAT = 32  # times the largest weight: from so much on, one digit is enough
NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.skipif(not ISAS, reason="no long vectors of bytes are multiplied here")


@pytest.fixture(params=ISAS, autouse=True)
def digits(request):
    before, threads = compiled.lib.isa(), compiled.lib.num_threads()
    compiled.lib.set_isa(request.param)
    compiled.lib.set_num_threads(2, [])
    yield
    compiled.lib.set_isa(before)
    compiled.lib.set_num_threads(threads, [])


def kept(codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """A cache of codes `[T, KVH, D]` with factors `[T, KVH]`: blocks in their order."""
    tail = factors.to(torch.float32).unsqueeze(-1).view(torch.int8)
    return in_blocks(torch.cat((codes.to(torch.int8), tail), -1))


def in_blocks(rows: torch.Tensor) -> torch.Tensor:
    missing = -len(rows) % BLOCK
    rows = torch.cat((rows, torch.full((missing, *rows.shape[1:]), 0x7F, dtype=torch.int8)))
    return rows.view(-1, BLOCK, *rows.shape[1:])


def attend(q, keys, values, length, spec):
    """The last `len(q)` tokens of `length`: `[T, H, D]`."""
    blocks = list(range(-(-length // BLOCK)))
    metadata = AttentionMetadata.build([len(q)], [length], [blocks], BLOCK)
    return native_attention.paged_attention(q.bfloat16(), keys, values, metadata, spec)


def whole_numbers(weights, factors):
    """Weights `[H, T, S]` of a row, by segments rounded to whole numbers of one digit or two, as
    csrc/digits.h says; `[H, 1, S]` are the values' factors. Also what one unit of them is, and
    which rows `[T]` are so near the border that float32 may choose otherwise."""
    weights, units = weights.clone(), torch.zeros_like(weights)
    near = torch.zeros(weights.shape[1], dtype=torch.bool)
    for start in range(0, weights.shape[-1], SEGMENT):
        part = weights[..., start : start + SEGMENT]
        scale = factors[..., start : start + SEGMENT]
        products = part * scale
        largest = products.amax(-1, keepdim=True)
        flatness = products.sum(-1, keepdim=True) / largest
        near |= ((flatness / FLAT).log().abs() < 1e-4).any(0)[:, 0]
        unit = largest / torch.where(flatness >= FLAT, 255, 255 * 256)
        part.copy_((products / unit).round().nan_to_num() * unit / scale)
        units[..., start : start + SEGMENT] = unit / scale
    return weights, units, near


def exact(q, keys, values, spec, dim):
    """The formula, in double precision, for queries as codes and weights as whole numbers; what one
    of these being a unit off can change; and rows that are not to be compared: `[T, H, D]`."""
    codes, factors = quantise_rows(q.float().flatten(0, 1))
    q = (codes.double() * factors.double().unsqueeze(1)).view(q.shape)
    k, v = (kv_types.numbers(x.flatten(0, 1), dim, dim).double() for x in (keys, values))
    tokens, heads = q.shape[:2]
    group = heads // k.shape[1]
    k, v = (x[:tokens].repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    ahead = torch.ones(tokens, tokens).triu(1).bool()
    if spec.window:
        ahead |= torch.ones(tokens, tokens).tril(-spec.window).bool()
    scores = scores.masked_fill(ahead, -INF)
    if spec.sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = spec.sinks.double().view(-1, 1, 1).expand(heads, tokens, 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    tails = values.flatten(0, 1)[:tokens, :, dim:].contiguous().view(torch.float32)
    factors = tails.double().repeat_interleave(group, 1).permute(1, 2, 0)
    weights, units, near = whole_numbers(weights, factors)
    off = (units * v.abs().amax(-1).T.unsqueeze(1)).amax(-1).T.unsqueeze(-1)
    return torch.einsum("hts,shd->thd", weights, v), off, near


SPECS = {
    "plain": {},
    "window": {"window": 300},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": True, "window": 70},
}


@pytest.mark.parametrize("how", SPECS)
@pytest.mark.parametrize(
    ("heads", "dim"), [((14, 2), 64), ((4, 4), 128), ((9, 1), 37), ((8, 2), 256), ((2, 1), 576)]
)
@pytest.mark.parametrize("sharp", [0.3, 3.0])
def test_as_the_formula(heads, dim, how, sharp):
    """Each number within half a step of bf16, two parts of 10,000 of the largest, and what two
    weights, rounded another way than in double precision, can change."""
    generator = torch.Generator().manual_seed(dim)
    h, kv = heads
    tokens = 700
    q = (torch.randn(tokens, h, dim, generator=generator) * sharp).bfloat16()
    k, v = torch.randn(2, tokens, kv, dim, generator=generator)
    v *= torch.logspace(-2, 2, tokens).roll(300).view(-1, 1, 1)  # factors unlike each other
    keys, values = (in_blocks(kv_types.stored(x, torch.int8)) for x in (k, v))
    options = dict(SPECS[how])
    if "sinks" in options:
        options["sinks"] = torch.randn(h, generator=generator)
    spec = AttentionSpec(dim**-0.5, **options)
    want, off, near = exact(q, keys, values, spec, dim)
    whole = attend(q, keys, values, tokens, spec)
    for threads in (1, 2):  # one computes all segments of a row, two cut them
        compiled.lib.set_num_threads(threads, [])
        few = [attend(q[t : t + 1], keys, values, t + 1, spec) for t in range(0, tokens, 41)]
        assert torch.equal(torch.cat(few), whole[::41])
    error = (whole.double() - want).abs()
    biggest = want.abs().amax((1, 2), keepdim=True)
    within = error <= want.abs() * 2**-7.95 + biggest * 2e-4 + 2 * off
    assert (within | near.view(-1, 1, 1)).all(), (error / biggest).max()
    assert near.sum() < 5


@pytest.mark.parametrize("dim", [64, 256, 512, 520, 576, 608, 640, 4096])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_fit(dim, sign):
    """All codes 127 and all queries equal; weights too, of a whole segment and values of 127."""
    codes = torch.full((256, 1, dim), 127)
    keys = kept(codes, torch.tensor(1 / (127 * dim)).expand(256, 1))
    values = kept(codes * sign, torch.full((256, 1), 0.5))
    q = torch.full((256, 1, dim), -2.0 * sign)
    out = attend(q, keys, values, 256, AttentionSpec(1.0))
    assert torch.equal(out, torch.full_like(out, 63.5 * sign))
    # Of two keys that are each other's opposite, one has all but e**-4 of the weight.
    codes[0] = -127
    keys = kept(codes[:2], torch.tensor(1 / (127 * dim)).expand(2, 1))
    values = kept(codes[:2], torch.full((2, 1), 1 / 127))
    for rows in (2, 1):
        out = attend(torch.full((rows, 1, dim), 2.0 * sign), keys, values, 2, AttentionSpec(1.0))
        assert out[-1].tolist() == [pytest.approx([sign * math.tanh(2.0)] * dim, rel=2**-8)]


def test_small_differences_of_weights_are_kept():
    """Two positions of the same key but for one code, with opposite values."""
    codes = torch.full((2, 1, 64), 100)
    codes[1, 0, 0] = 101
    keys = kept(codes, torch.full((2, 1), 1e-4))
    values = kept(torch.tensor([[[-127] * 64], [[127] * 64]]), torch.full((2, 1), 1 / 127))
    for x in (1.0, 10.0, 100.0):
        q = torch.full((1, 1, 64), x)
        out = attend(q, keys, values, 2, AttentionSpec(1.0))
        # Weights are as near as one part in 32,512 each.
        assert out[0, 0, 0].item() == pytest.approx(math.tanh(x * 1e-4 / 2), abs=4e-5, rel=5e-3)


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("small", [1e-3, 1e-2, 0.1, 0.2])
def test_small_weights_beside_a_large_one_are_kept(rows, small):
    """One position of 256 outweighs each other one by so much. In one digit a thousandth would be
    nothing; fifths weigh enough together that one digit is used."""
    codes = torch.zeros((SEGMENT, 1, 64))
    codes[7] = 127
    keys = kept(codes, torch.full((SEGMENT, 1), -math.log(small) / (64 * 127)))
    codes = torch.full((SEGMENT, 1, 64), 127)
    codes[7] = 0
    values = kept(codes, torch.full((SEGMENT, 1), 1 / 127))
    out = attend(torch.ones(rows, 1, 64), keys, values, SEGMENT, AttentionSpec(1.0))
    total = (SEGMENT - 1) * small
    assert out[-1, 0, 0].item() == pytest.approx(total / (total + 1), rel=8e-3)


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (8, 1), (14, 2), (30, 2)])
def test_rows_of_one_digit_and_of_two_side_by_side(heads):
    """Each row has the bits that it has alone."""
    generator = torch.Generator().manual_seed(5)
    h, kv = heads
    k, v = torch.randn(2, 2 * SEGMENT, kv, 64, generator=generator)
    keys, values = (in_blocks(kv_types.stored(x, torch.int8)) for x in (k, v))
    q = torch.randn(3, h, 64, generator=generator)
    q *= (
        torch.tensor([0.1, 4.0])
        .repeat(2 * h)[torch.randperm(3 * h, generator=generator)]
        .view(3, h, 1)
    )
    spec = AttentionSpec(0.125)
    got = attend(q, keys, values, 2 * SEGMENT, spec)
    for one in range(h // kv):
        mine = q.view(3, kv, -1, 64)[:, :, one]
        alone = attend(mine, keys, values, 2 * SEGMENT, spec)
        assert torch.equal(alone, got.view(3, kv, -1, 64)[:, :, one])
        for token in range(3):
            single = attend(mine[token : token + 1], keys, values, 2 * SEGMENT - 2 + token, spec)
            assert torch.equal(single[0], alone[token])


@pytest.mark.parametrize("rows", [1, 12])
def test_numbers_that_are_none_stay_none(rows):
    """And are no other row's or head's matter."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (2, 300, 2, 64), generator=generator)
    factors = torch.rand(2, 300, 2, generator=generator) / 50
    q = torch.randn(rows, 4, 64, generator=generator)
    spec = AttentionSpec(0.1)
    keys, values = (kept(c, f) for c, f in zip(codes, factors, strict=True))
    want = attend(q, keys, values, 300, spec)
    assert want.isfinite().all()
    for odd in (NAN, INF, -INF):
        worse = q.clone()
        worse[-1, 1, 5] = odd
        got = attend(worse, keys, values, 300, spec)
        assert got[-1, 1].isnan().all()
        got[-1, 1] = want[-1, 1]
        assert torch.equal(got, want)
    for number, side in enumerate((keys, values)):
        kept_before = side.clone()
        side.flatten(0, 1)[20, 1, 64:] = torch.tensor([NAN]).view(torch.int8)
        got = attend(q, keys, values, 300, spec)
        assert got[:, 2:].isnan().all() and torch.equal(got[:, :2], want[:, :2]), number
        side.copy_(kept_before)


@pytest.mark.parametrize("rows", [1, 12])
def test_nothing_weighs_nothing(rows):
    """Queries of 0 see all alike; values of 0, or far below what counts, are 0."""
    codes = torch.randint(-127, 128, (40, 1, 64))
    keys = kept(codes, torch.ones(40, 1))
    values = kept(codes, torch.full((40, 1), 0.25))
    for q in (0.0, 1e-35):
        out = attend(torch.full((rows, 1, 64), q), keys, values, 40, AttentionSpec(1.0))
        mean = codes[:, 0].double().mean(0) * 0.25
        assert torch.allclose(out[-1, 0].double(), mean, rtol=2**-8, atol=1e-3)
    for small in (0.0, 1e-33):
        values = kept(codes, torch.full((40, 1), small))
        out = attend(torch.ones(rows, 1, 64), keys, values, 40, AttentionSpec(1.0))
        assert (out[-1] == 0).all()
