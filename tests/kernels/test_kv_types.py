"""Keys and values of one byte: what is written, what it means when it is read, on every
instruction set; the formats by their definition, number by number."""

import math

import pytest
import torch

from quire.attention.kv_cache import allocate_kv_cache, kv_cache_bytes
from quire.attention.paged import PagedAttention
from quire.config.kv_dtypes import KV_CACHE_DTYPES, kept_layers
from quire.config.shape import LayerKV
from quire.errors import ConfigError
from quire.kernels import kv_types, native_attention, reference
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.cache_tensors import raw

NAN, INF = float("nan"), float("inf")
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
SHORT = [E4M3, E5M2, INT8]


def slow_float8(code: int, kind: torch.dtype) -> float:
    """A number of the type, from the formula of the format."""
    bits, bias = (3, 7) if kind is E4M3 else (2, 15)
    sign, exponent = -1.0 if code & 128 else 1.0, (code & 127) >> bits
    fraction = (code & ((1 << bits) - 1)) / (1 << bits)
    if kind is E5M2 and exponent == 31:
        return sign * INF if fraction == 0 else NAN
    if kind is E4M3 and code & 127 == 127:
        return NAN
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def cache_of(kind, heads=2, dim=80, blocks=5):
    return torch.zeros(blocks, 8, heads, dim + kv_types.TAILS.get(kind, 0), dtype=kind)


def edges(kind: torch.dtype) -> torch.Tensor:
    """Numbers of float8, the middles between neighbours, what is next to those, and beyond."""
    if kind is INT8:
        return torch.tensor([0.0, -0.0, 1.0, -3.5, 2.5, 1e-30, 1e30, 127.0, 0.5, 1.5])
    known = sorted({slow_float8(code, kind) for code in range(128)} - {INF}, key=lambda x: x)
    finite = torch.tensor([x for x in known if math.isfinite(x)], dtype=torch.float64)
    middle = (finite[1:] + finite[:-1]) / 2
    near = torch.cat((middle, middle * (1 + 2e-7), middle * (1 - 2e-7), finite, finite[-1:] * 1.1))
    more = torch.tensor([1e30, 1e-30, INF], dtype=torch.float64)
    found = torch.cat((near, more)).float()
    return torch.cat((found, -found, torch.tensor([NAN, 0.0, -0.0])))


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_the_plain_twin_reads_and_rounds_as_the_format_says(kind):
    codes = torch.arange(256, dtype=torch.int64).to(torch.uint8).view(kind)
    got = kv_types.numbers(codes, 256, 256).tolist()
    want = [slow_float8(code, kind) for code in range(256)]
    assert all(a == b or (a != a and b != b) for a, b in zip(got, want, strict=True))
    largest = max(x for x in want if math.isfinite(x))
    table = sorted((x, code) for code, x in enumerate(want[:128]) if math.isfinite(x))
    for x in edges(kind).tolist():
        (kept,) = kv_types.numbers(kv_types.stored(torch.tensor([x]), kind), 1, 1).tolist()
        if x != x:
            assert kept != kept
            continue
        size = min(abs(x), largest)
        # The nearest; of two as near, the one whose code is even.
        best = min(table, key=lambda one: (abs(one[0] - size), one[1] & 1))
        assert kept == math.copysign(best[0], x), x


def test_int8_keeps_a_scale_for_each_token_and_head():
    x = torch.randn(9, 3, 40)
    x[2, 1] = 0
    x[3, 0, 7] = NAN
    x[4, 0, 7] = INF
    kept = kv_types.stored(x, INT8)
    assert kept.shape == (9, 3, 44)
    got = kv_types.numbers(kept, 40, 40)
    error = (got - x).abs() / x.abs().amax(-1, keepdim=True)
    whole = x.isfinite().all(-1)
    assert (error[whole & (x != 0).any(-1)] <= 0.5 / 127 + 1e-6).all()
    assert (got[2, 1] == 0).all() and got[3, 0].isnan().all() and got[4, 0].isnan().all()


def same_bytes(a, b):
    """NaN equals NaN: which bits of it a type without others keeps is left open."""
    a, b = raw(a), raw(b)
    return torch.equal(a, b)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", SHORT, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [80, 37])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_written_as_the_plain_twin_writes(kind, dtype, dim, scale):
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(200, 2, dim, generator=generator) * torch.logspace(-6, 4, 200).view(-1, 1, 1)
    odd = edges(kind)
    k.view(-1)[: len(odd)] = odd
    k, v = k.to(dtype), torch.flip(k, [0]).to(dtype)
    slots = torch.randperm(240)[:200]
    caches = [cache_of(kind, 2, dim, 30) for _ in range(4)]
    native_attention.write_kv(k, v, caches[0], caches[1], slots, (scale, 2 * scale))
    reference.write_kv(k, v, caches[2], caches[3], slots, (scale, 2 * scale))
    for got, want in zip(caches[:2], caches[2:], strict=True):
        if kind is not INT8:
            got, want = got.to(torch.float32), want.to(torch.float32)
            assert torch.equal(got.isnan(), want.isnan())
            got, want = got.nan_to_num(), want.nan_to_num()
            assert torch.equal(got, want)
            continue
        nan = kv_types.numbers(want, dim, dim).isnan().all(-1)
        assert torch.equal(kv_types.numbers(got, dim, dim).isnan().all(-1), nan)
        assert same_bytes(got[~nan], want[~nan])


class Served:
    """One request in scattered blocks of a cache of some type."""

    def __init__(self, kind, dtype, heads, dim, length=600):
        generator = torch.Generator().manual_seed(7)
        h, kv = heads
        self.q = (torch.randn(length, h, dim, generator=generator) * 1.5).to(dtype)
        self.k = (torch.randn(length, kv, dim, generator=generator) * 1.5).to(dtype)
        self.v = torch.randn(length, kv, dim, generator=generator).to(dtype)
        self.length = length
        self.blocks = torch.randperm(90, generator=generator)[: -(-length // 8)].tolist()
        self.metadata = AttentionMetadata.build([length], [length], [self.blocks], 8)
        self.caches = [cache_of(kind, kv, dim, 90) for _ in range(2)]
        for cache in self.caches:
            if kind is torch.bfloat16:
                cache.fill_(NAN)
            else:
                raw(cache).fill_(0x7F)


@pytest.mark.parametrize("kind", SHORT, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [((14, 2), 64), ((2, 2), 37), ((5, 1), 40)])
def test_read_as_the_numbers_that_it_stands_for(isa, kind, dtype, heads, dim):
    """Bit for bit what attention over a cache of these numbers gives, in the type that enters the
    products. The scales of int8, which scores and weights are multiplied with, round nothing if
    they are powers of two; with its own ones, it is as near as any. Where queries over int8 become
    codes, too, it is near (and `test_kv_digits.py` says how near to that)."""
    pairs = isa in ("amx", "avx512_bf16") and dtype is torch.bfloat16
    in_pairs = pairs and dim % 2 == 0
    in_digits = (pairs or (isa == "avx512_vnni" and dtype is torch.bfloat16)) and kind is INT8
    one = Served(kind, dtype, heads, dim)
    slots = one.metadata.slot_mapping
    native_attention.write_kv(one.k, one.v, *one.caches, slots)
    spec = AttentionSpec(dim**-0.5, window=450)
    if kind is INT8:
        plain = reference.paged_attention(one.q, *one.caches, one.metadata, spec)
        got = native_attention.paged_attention(one.q, *one.caches, one.metadata, spec)
        most = 1.2e-2 if in_digits else 8e-3 if dtype is torch.bfloat16 else 1e-5
        assert (got.float() - plain.float()).norm() < most * plain.float().norm()
        if in_digits:
            return
        for cache in one.caches:
            exponents = torch.randint(-9, -4, cache.shape[:-1], dtype=torch.float32)
            cache[..., dim:] = torch.exp2(exponents).unsqueeze(-1).view(INT8)
    got = native_attention.paged_attention(one.q, *one.caches, one.metadata, spec)
    read = torch.bfloat16 if in_pairs else torch.float32
    wide = [kv_types.numbers(cache, dim, dim).to(read).contiguous() for cache in one.caches]
    want = native_attention.paged_attention(one.q, *wide, one.metadata, spec)
    assert got.isfinite().all() and torch.equal(got, want)
    plain = reference.paged_attention(one.q, *one.caches, one.metadata, spec)
    assert (got.float() - plain.float()).norm() < 8e-3 * plain.float().norm()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", [torch.bfloat16, *SHORT], ids=str)
@pytest.mark.parametrize("dim", [128, 96, 80, 64, 256, 40, 37])
@pytest.mark.parametrize("window", [0, 70])
def test_few_rows_have_the_bits_of_many(kind, dim, window):
    """Up to 27 rows at a time, ends at borders of vectors, blocks and segments, against those of a
    whole prompt; garbage stands behind them in the cache."""
    kv = 2
    for group in range(1, 10) if dim in (64, 80) else (1, 6, 8):
        whole, one = (Served(kind, torch.bfloat16, (group * kv, kv), dim) for _ in range(2))
        slots = one.metadata.slot_mapping
        spec = AttentionSpec(dim**-0.5, window=window or None)
        native_attention.write_kv(whole.k, whole.v, *whole.caches, slots)
        want = native_attention.paged_attention(whole.q, *whole.caches, whole.metadata, spec)
        assert want.isfinite().all()
        begin = 0
        for end in (1, 2, 15, 16, 17, 31, 33, 64, 100, 255, 256, 257, 300, 511, 513, 600):
            new = slice(begin, end)
            native_attention.write_kv(one.k[new], one.v[new], *one.caches, slots[new])
            for rows in (1, min(end, 3)):
                metadata = AttentionMetadata.build([rows], [end], [one.blocks], 8)
                these = slice(end - rows, end)
                got = native_attention.paged_attention(one.q[these], *one.caches, metadata, spec)
                assert torch.equal(got, want[these]), (group, end, rows)
            begin = end


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_scales_of_a_layer_come_back(kind):
    """Keys and values far outside the type are served as those inside it."""
    one = Served(kind, torch.float32, (4, 2), 64)
    spec = AttentionSpec(0.125)
    slots = one.metadata.slot_mapping
    native_attention.write_kv(one.k, one.v, *one.caches, slots)
    want = native_attention.paged_attention(one.q, *one.caches, one.metadata, spec)
    scaled = AttentionSpec(0.125 / 4096, kv_scales=(4096.0, 2.0**15))
    for kernels in (native_attention, reference):
        kernels.write_kv(one.k * 4096, one.v * 2.0**15, *one.caches, slots, scaled.kv_scales)
        got = kernels.paged_attention(one.q, *one.caches, one.metadata, scaled)
        assert (got / 2.0**15 - want).norm() < 1e-5 * want.norm()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", KV_CACHE_DTYPES)
@pytest.mark.parametrize("kernels", [native_attention, reference])
def test_latents_of_every_type(kind, kernels):
    """Values that are the beginning of the keys."""
    rank, rope, tokens = 20, 8, 90
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, 4, rank + rope, generator=generator)
    k = torch.randn(tokens, 1, rank + rope, generator=generator)
    (layer,) = kept_layers([LayerKV(1, rank + rope, 0)], "float32", kind)
    (cache,) = allocate_kv_cache([layer], 8, 16, "float32", "cpu")
    blocks = [[6, 2, 1, 7, 4, 3]]
    metadata = AttentionMetadata.build([tokens], [tokens], blocks, 16)
    spec = AttentionSpec(0.2, latent_dim=rank)
    got = PagedAttention(kernels).forward(q, k, k[..., :0], cache, metadata, spec)
    kept = kv_types.stored(k, cache.dtype)
    wide = kv_types.numbers(kept, rank + rope, rank + rope)
    scores = (q.transpose(0, 1) @ wide[:, 0].T) * 0.2
    hidden = torch.ones(tokens, tokens).triu(1).bool()
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    want = (weights @ wide[:, 0, :rank]).transpose(0, 1)
    assert (got - want).norm() < 1e-5 * want.norm()


def test_bytes_and_layers():
    own = [LayerKV(2, 64, 64, window) for window in (None, 128, 128)]
    sizes = {
        name: kv_cache_bytes(kept_layers(own, "bfloat16", name), 10, 16, "bfloat16")
        for name in KV_CACHE_DTYPES
    }
    whole = 3 * 10 * 16 * 2 * 128 * 2
    assert sizes == {
        "auto": whole, "bfloat16": whole, "float16": whole,
        "fp8": whole // 2, "fp8_e4m3": whole // 2, "fp8_e5m2": whole // 2,
        "int8_per_token_head": whole // 2 * 68 // 64,
    }  # fmt: skip
    assert kept_layers(own, "bfloat16", "bfloat16") == tuple(own)
    skipped = kept_layers(own, "bfloat16", "fp8", ["1"])
    assert [layer.dtype for layer in skipped] == ["float8_e4m3fn", None, "float8_e4m3fn"]
    skipped = kept_layers(own, "bfloat16", "fp8", ["sliding_window"])
    assert [layer.dtype for layer in skipped] == ["float8_e4m3fn", None, None]
    with pytest.raises(ConfigError, match="layers 0 to 2, got 3"):
        kept_layers(own, "bfloat16", "fp8", ["3"])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", SHORT, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_code_is_read_as_its_number(kind, dtype):
    """Attention over a single position gives its value."""
    codes = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    if kind is INT8:
        codes[128] = 0  # -128 is never written
    keys, values = (cache_of(kind, 1, 256, 1) for _ in range(2))
    raw(values)[0, 0, 0, :256] = codes
    if kind is INT8:
        values[..., 256:] = torch.tensor([0.25]).view(INT8)
        codes = values[0, 0, 0]
    codes = codes.view(kind)
    metadata = AttentionMetadata.build([1], [1], [[0]], 8)
    q = torch.zeros(1, 1, 256, dtype=dtype)
    got = native_attention.paged_attention(q, keys, values, metadata, AttentionSpec(1.0))[0, 0]
    want = kv_types.numbers(codes, 256, 256)
    number = want.isfinite()
    assert torch.equal(got.float()[number], want[number])
    assert torch.equal(got.isnan(), want.isnan())
    assert not got[~number].isfinite().any()
    keys.copy_(values)
    if kind is INT8:
        keys[..., 256:] = torch.tensor([NAN]).view(INT8)
    q[:] = 1
    got = native_attention.paged_attention(q, keys, values, metadata, AttentionSpec(1.0))
    assert got.isnan().all(), "a key that is no number"
