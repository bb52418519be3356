"""Compiled attention, rotary positions and KV writes on every instruction set this machine has:
against float64, against the plain twins, and bit by bit however a request is served."""

import random
from dataclasses import dataclass

import pytest
import torch

from kernel_kit import SANITIZED, error, on_every_isa, same
from quire.kernels import compiled, native_attention, reference, rope
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.attention_spec import AttentionSpec

pytestmark = on_every_isa

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMIT = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Relative norm of the error against float64. bf16: 1.7e-3 is the rounding of the result alone,
which the rounding of the weights on AVX512_BF16 brings to 1.9e-3."""
HEADS = {
    "GQA 7x64": (14, 2, 64, 64),
    "MHA 80": (2, 2, 80, 80),
    "MQA 40": (5, 1, 40, 40),
    "GQA 96": (6, 3, 96, 96),
    "wide 256": (2, 1, 256, 256),
    "narrow 32": (3, 3, 32, 32),
    "latent": (4, 1, 72, 56),
    "odd": (2, 1, 37, 21),
    "very wide": (3, 1, 640, 624),
}
SPECS = {
    "plain": {},
    "window": {"window": 70},
    "narrow window": {"window": 1},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": True},
    "sinks": {"sinks": True},
    "all": {"window": 300, "softcap": 9.0, "alibi_slopes": True, "sinks": True},
}
NAN = float("nan")


def made_spec(name, heads, key_dim):
    what = dict(SPECS[name])
    if what.get("alibi_slopes"):
        what["alibi_slopes"] = 2.0 ** -torch.linspace(1, 6, heads)
    if what.get("sinks"):
        what["sinks"] = torch.linspace(-1, 3, heads)
    return AttentionSpec(key_dim**-0.5, **what)


@dataclass(eq=False)
class Request:
    """Random q, k, v of one request."""

    length: int
    heads: str
    seed: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        h, kv, key_dim, value_dim = HEADS[self.heads]
        generator = torch.Generator().manual_seed(self.seed)

        def draw(n, dim):
            x = torch.randn(self.length, n, dim, generator=generator)
            return (x * 1.5).to(self.dtype)

        self.q, self.k, self.v = draw(h, key_dim), draw(kv, key_dim), draw(kv, value_dim)

    def spec(self, name="plain"):
        return made_spec(name, HEADS[self.heads][0], HEADS[self.heads][2])

    def dense(self, spec):
        """The formula in float64."""
        q, k, v = (x.double().transpose(0, 1) for x in (self.q, self.k, self.v))
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) * spec.scale
        if spec.softcap:
            scores = spec.softcap * (scores / spec.softcap).tanh()
        places = torch.arange(self.length)
        distance = (places - places.unsqueeze(1)).double()
        if spec.alibi_slopes is not None:
            scores += spec.alibi_slopes.double().view(-1, 1, 1) * distance
        hidden = distance > 0
        if spec.window:
            hidden |= distance <= -spec.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if spec.sinks is not None:
            sinks = spec.sinks.double().view(-1, 1, 1).expand(-1, self.length, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : self.length]
        return (weights @ v).transpose(0, 1)


class Server:
    """Serves requests from scattered blocks of a cache full of garbage."""

    def __init__(self, requests, block_size, rng=None, garbage=NAN):
        self.requests, self.block_size = requests, block_size
        self.rng = rng or random.Random(0)
        needs = [-(-r.length // block_size) for r in requests]
        free = list(range(sum(needs) + 3))
        self.rng.shuffle(free)
        self.tables = [[free.pop() for _ in range(n)] for n in needs]
        self.caches = [
            torch.full((sum(needs) + 3, block_size, *part.shape[1:]), garbage).to(part.dtype)
            for part in (requests[0].k, requests[0].v)
        ]

    def step(self, parts, spec):
        """Rows of `parts`: request index to slice of tokens."""
        block = self.block_size
        metadata = AttentionMetadata.build(
            [p.stop - p.start for p in parts.values()],
            [p.stop for p in parts.values()],
            [self.tables[i][: -(-p.stop // block)] for i, p in parts.items()],
            block,
        )
        q, k, v = (
            torch.cat([getattr(self.requests[i], name)[p] for i, p in parts.items()])
            for name in "qkv"
        )
        native_attention.write_kv(k, v, *self.caches, metadata.slot_mapping)
        out = native_attention.paged_attention(q, *self.caches, metadata, spec)
        return dict(zip(parts, out.split([p.stop - p.start for p in parts.values()]), strict=True))

    def serve(self, chunk, spec):
        """All rows of each request, computed `chunk()` tokens at a time in random company."""
        rows, done = [[] for _ in self.requests], [0] * len(self.requests)
        while True:
            left = [i for i, r in enumerate(self.requests) if done[i] < r.length]
            if not left:
                return [torch.cat(r) for r in rows]
            self.rng.shuffle(left)
            parts = {
                i: slice(done[i], min(done[i] + chunk(), self.requests[i].length)) for i in left
            }
            for i, got in self.step(parts, spec).items():
                rows[i].append(got)
                done[i] = parts[i].stop


def alone(request, spec, block_size=16):
    return Server([request], block_size).serve(lambda: request.length, spec)[0]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(heads, dtype):
    for length in (1, 5, 64, 65, 300):
        request = Request(length, heads, length, dtype)
        got = alone(request, request.spec())
        assert got.dtype == dtype
        limit = LIMIT[dtype] * (2 if heads == "very wide" else 1)  # sums of ten times as many
        assert error(got, request.dense(request.spec())) < limit, length


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_features_against_float64(spec, dtype):
    """Window, soft-cap, slopes and sinks, over several segments."""
    for heads, length in (("GQA 7x64", 560), ("latent", 300)):
        request = Request(length, heads, 1, dtype)
        got = alone(request, request.spec(spec))
        assert error(got, request.dense(request.spec(spec))) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_wider_than_the_cache(dtype):
    request = Request(100, "GQA 96", 3, dtype)
    want = request.dense(request.spec())
    request.q = request.q.float()
    assert error(alone(request, request.spec()), want) < LIMIT[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "spec"),
    [("GQA 7x64", "plain"), ("MHA 80", "window"), ("MQA 40", "all"), ("latent", "sinks")],
)
def test_same_bits_however_it_is_served(dtype, heads, spec):
    """Blocks, strangers, cuts, garbage, and one thread or two: nothing changes a bit."""
    rng = random.Random(f"{heads}{spec}")
    subject = Request(rng.randint(520, 620), heads, 7, dtype)
    what = subject.spec(spec)
    want = alone(subject, what)
    ways = ((8, 2), (16, 1), (32, 2), (64, 1), (128, 2))
    for block_size, threads in ways[:2] if SANITIZED else ways:
        compiled.lib.set_num_threads(threads, [])
        strangers = [Request(rng.choice([1, 33, 290]), heads, i, dtype) for i in range(2)]
        requests = [*strangers, subject]
        rng.shuffle(requests)
        limit = rng.choice([70, 300, 600])
        garbage = rng.choice([NAN, float("inf"), 1e30])
        server = Server(requests, block_size, rng, garbage)
        got = server.serve(lambda limit=limit: rng.randint(1, limit), what)
        assert same(got[requests.index(subject)], want), (block_size, threads, limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", ["plain", "all"])
def test_decoding_is_prefill(dtype, spec):
    """Token by token across the border of two segments, alone and beside others."""
    subject = Request(800, "GQA 7x64", 3, dtype)
    others = [Request(n, "GQA 7x64", n, dtype) for n in (30, 790, 400)]
    what = subject.spec(spec)
    want = alone(subject, what)
    server = Server([subject, *others], 16)
    server.step({i: slice(0, r.length - 8) for i, r in enumerate(server.requests)}, what)
    server.step({0: slice(0, 763)}, what)
    for position in range(763, 775):
        got = server.step({0: slice(position, position + 1)}, what)[0]
        assert same(got[0], want[position]), position
    for i in range(8):
        place = {
            n: slice(r.length - 8 + i, r.length - 7 + i) for n, r in enumerate(server.requests)
        }
        got = server.step({0: slice(775 + i, 776 + i)} | {n: place[n] for n in (2, 3, 1)}, what)
        assert same(got[0][0], want[775 + i]), i


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_long_row_cut_between_threads(threads):
    length = 1500 if SANITIZED else 5000
    subject = Request(length, "MQA 40", 5, torch.bfloat16)
    what = subject.spec()
    want = alone(subject, what)[-1]
    compiled.lib.set_num_threads(threads, [])
    server = Server([subject, Request(300, "MQA 40", 1, torch.bfloat16)], 32)
    last, end = length - 1, length
    server.step({0: slice(0, last)}, what)
    assert same(server.step({0: slice(last, end)}, what)[0][0], want)
    assert same(server.step({1: slice(0, 300), 0: slice(end - 10, end)}, what)[0][-1], want)


def test_only_what_is_seen_is_read():
    """Table entries past a request's end, or before its window, may be anything."""
    request = Request(300, "GQA 7x64", 4, torch.bfloat16)
    what = AttentionSpec(0.125, window=40)
    want = alone(request, what)
    server = Server([request], 8)
    server.step({0: slice(0, 290)}, what)
    for block in server.tables[0][:31]:  # positions 0 to 247; the first row sees 251 on
        for cache in server.caches:
            cache[block] = NAN
    server.tables[0][:31] = [10**6] * 31
    metadata = AttentionMetadata.build([10], [300], [[*server.tables[0], -1, 10**6]], 8)
    new = slice(290, 300)
    native_attention.write_kv(request.k[new], request.v[new], *server.caches, metadata.slot_mapping)
    got = native_attention.paged_attention(request.q[new], *server.caches, metadata, what)
    assert same(got, want[new])


def test_strides():
    """Queries that are part of a wider matrix, caches inside larger ones, values inside keys."""
    request = Request(70, "latent", 4, torch.bfloat16)
    what = request.spec()
    request.v = request.k[..., :56].contiguous()
    want = alone(request, what)
    server = Server([request], 16)
    metadata = AttentionMetadata.build([70], [70], [server.tables[0]], 16)
    wide = torch.full((70, 9, 100), NAN).bfloat16()
    wide[:, 2:6, 11:83] = request.q
    cache = torch.full((len(server.caches[0]), 2, 16, 1, 90), NAN).bfloat16()
    keys = cache[:, 1, ..., 5:77]
    native_attention.write_kv(request.k, request.k[..., :0], keys, keys[..., :0],
                              metadata.slot_mapping)  # fmt: skip
    got = native_attention.paged_attention(
        wide[:, 2:6, 11:83], keys, keys[..., :56], metadata, what
    )
    assert same(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", ["plain", "all"])
def test_not_a_number_is_not_hidden(dtype, spec):
    """A request with NaN among its own keys or values gets NaN (its earlier rows may, too); a
    stranger does not."""
    subject, stranger = (Request(70, "GQA 7x64", i, dtype) for i in (1, 2))
    want = alone(subject, subject.spec(spec))
    for part in (stranger.k, stranger.v):
        part[3, 1, 5] = NAN
        got = Server([stranger, subject], 16).serve(lambda: 23, subject.spec(spec))
        assert same(got[1], want)
        assert got[0][-1, 7:, 5].isnan().all()


def test_an_empty_step_of_large_scores():
    """Scores far apart: weights underflow to exact zeros and nothing overflows."""
    request = Request(300, "GQA 7x64", 6)
    request.q *= 300
    request.k *= 300
    assert error(alone(request, request.spec()), request.dense(request.spec())) < 2e-5


# ---- rotary positions and writing ----------------------------------------------------------------


def rotary_inputs(dtype, tokens=19, heads=5, kv_heads=2, dim=80):
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    return qkv.split((heads, kv_heads, kv_heads), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rotary_dim", "offset"), [(80, 0), (64, 0), (20, 0), (2, 0), (32, 48)])
def test_rotary_and_write(dtype, interleaved, rotary_dim, offset):
    """Bit for bit the plain twin; with positions in the formula, right in float64."""
    q, k, v = rotary_inputs(dtype)
    angles = torch.rand(50, rotary_dim // 2, dtype=torch.float64) * 6
    turn = rope.Rotation(
        torch.cat((angles.cos(), angles.sin()), 1).float(), interleaved=interleaved, offset=offset
    )
    positions, slots = torch.randint(0, 50, (19,)), torch.randperm(40)[:19]
    caches = [torch.full((5, 8, 2, 80), NAN).to(dtype) for _ in range(4)]
    want_q, want_k = q.clone(), k.clone()
    want_q, want_k = rope.rotary_write_kv(
        want_q, want_k, v, positions, turn, caches[0], caches[1], slots
    )
    got_q, got_k = q.clone(), k.clone()
    packed = torch.cat((got_q, got_k, v), 1)
    parts = packed.split((5, 2, 2), 1)
    got_q, got_k = native_attention.rotary_write_kv(
        *parts, positions, turn, caches[2], caches[3], slots
    )
    assert same(got_q, want_q) and same(got_k, want_k)
    assert same(caches[0], caches[2]) and same(caches[1], caches[3])
    assert same(caches[2].view(40, 2, 80)[slots], want_k)
    part = q[..., offset : offset + rotary_dim].double()
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    pairs = torch.complex(a, b) * torch.exp(1j * angles[positions]).unsqueeze(1)
    turned = (
        torch.stack((pairs.real, pairs.imag), -1).flatten(-2)
        if interleaved
        else torch.cat((pairs.real, pairs.imag), -1)
    )
    assert error(got_q[..., offset : offset + rotary_dim], turned) < LIMIT[dtype]
    assert same(got_q[..., :offset], q[..., :offset])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [80, 24])
def test_rotary_alone(dtype, interleaved, rotary_dim):
    q, k, _ = rotary_inputs(dtype)
    table, positions = torch.randn(50, rotary_dim), torch.randint(0, 50, (19,))
    before = q.clone()
    got = native_attention.rotary_partial(q, k, positions, table, interleaved)
    want = reference.rotary_partial(q, k, positions, table, interleaved)
    assert same(got[0], want[0]) and same(got[1], want[1]) and same(q, before)
    if rotary_dim == 80 and not interleaved:
        got = native_attention.rotary(q, k, positions, table)
        want = reference.rotary(q, k, positions, table)
        assert same(got[0], want[0]) and same(got[1], want[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_kv(dtype):
    _, k, v = rotary_inputs(dtype)
    slots = torch.randperm(40)[:19]
    caches = [torch.zeros(5, 8, 2, 80, dtype=dtype) for _ in range(4)]
    native_attention.write_kv(k, v, caches[0], caches[1], slots)
    reference.write_kv(k, v, caches[2], caches[3], slots)
    assert same(caches[0], caches[2]) and same(caches[1], caches[3])
