"""Norm, activation, rotary, linear and the KV write: right, and each row on its own."""

import pytest
import torch

from kernel_kit import same
from quire.kernels import reference, tiles
from quire.kernels.dispatch import ops, select

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, scope="module")
def plain():
    """Of all implementations the plain one."""
    before = ops.name
    select("reference")
    yield
    select(before)


def rows_alone(function, *tensors):
    """Apply a row-wise function to each row on its own and stack the results."""
    count = tensors[0].shape[0]
    return torch.cat([function(*(t[i : i + 1] for t in tensors)) for i in range(count)])


def tolerance(dtype):
    return {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    torch.set_num_threads(request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype):
    x, weight = torch.randn(33, 80).to(dtype), torch.randn(80).to(dtype)
    got = ops.rms_norm(x, weight, 1e-5)
    wide = x.double()
    want = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    torch.testing.assert_close(got.double(), want, atol=tolerance(dtype), rtol=tolerance(dtype))
    assert got.dtype == dtype
    assert same(rows_alone(lambda r: ops.rms_norm(r, weight, 1e-5), x), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_add_is_the_norm_of_the_rounded_sum(dtype):
    x, residual = torch.randn(2, 9, 64).to(dtype)
    weight = torch.randn(64).to(dtype)
    normed, total = ops.rms_norm_add(x, residual, weight, 1e-6)
    assert same(total, x + residual)
    assert same(normed, ops.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype):
    x = (torch.randn(21, 2 * 37) * 8).to(dtype)
    x[0, 0], x[1, 0] = -300.0, 300.0
    got = ops.silu_and_mul(x)
    gate, up = x.double().chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=tolerance(dtype))
    assert same(rows_alone(ops.silu_and_mul, x), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_matches_the_rotate_half_formula(dtype):
    q, k = torch.randn(12, 4, 16).to(dtype), torch.randn(12, 2, 16).to(dtype)
    positions = torch.randint(0, 50, (12,))
    table = torch.randn(50, 16)
    got = ops.rotary(q, k, positions, table)
    cos, sin = table[positions].double().chunk(2, -1)
    cos, sin = torch.cat([cos, cos], -1).unsqueeze(1), torch.cat([sin, sin], -1).unsqueeze(1)
    for x, y in zip((q, k), got, strict=True):
        wide = x.double()
        turned = torch.cat([-wide[..., 8:], wide[..., :8]], -1)
        want = wide * cos + turned * sin
        torch.testing.assert_close(y.double(), want, atol=tolerance(dtype), rtol=tolerance(dtype))
    alone = rows_alone(lambda a, p: ops.rotary(a, a, p, table)[0], q, positions)
    assert same(alone, got[0])


def test_write_kv_and_embedding_copy_bits():
    cache = torch.zeros(5, 8, 2, 16), torch.zeros(5, 8, 2, 16)
    k, v = torch.randn(2, 4, 2, 16)
    slots = torch.tensor([33, 0, 7, 8])
    ops.write_kv(k, v, *cache, slots)
    for new, kept in zip((k, v), cache, strict=True):
        assert same(kept.view(40, 2, 16)[slots], new)
        assert kept.count_nonzero() == new.numel()
    weight = torch.randn(11, 6)
    assert same(ops.embedding(torch.tensor([10, 0, 10]), weight), weight[[10, 0, 10]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(96, 48), (37, 50), (1, 64), (512, 256)])
def test_linear_row_depends_on_itself_alone(threads, dtype, n, k):
    layer = ops.prepare_linear(torch.randn(n, k).to(dtype), torch.randn(n).to(dtype))
    x = torch.randn(27, k).to(dtype)
    got = ops.linear(x, layer)
    wide = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    torch.testing.assert_close(got.double(), wide, atol=1e-4, rtol=tolerance(dtype))
    assert same(rows_alone(lambda row: ops.linear(row, layer), x), got)
    order = torch.randperm(27)
    assert same(ops.linear(x[order], layer), got[order])
    assert same(ops.linear(x[5:22], layer), got[5:22])
    assert same(ops.linear(x.t().contiguous().t(), layer), got)


def test_linear_has_the_same_bits_with_any_number_of_threads():
    layer = ops.prepare_linear(torch.randn(640, 256))
    x = torch.randn(30, 256)
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(ops.linear(x, layer))
    assert same(*results)


def test_linear_keeps_float32_sums_when_asked():
    weight, x = torch.randn(20, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    layer = ops.prepare_linear(weight)
    wide = ops.linear(x, layer, torch.float32)
    assert wide.dtype == torch.float32
    assert same(wide.bfloat16(), ops.linear(x, layer))
    assert not torch.equal(wide, wide.bfloat16().float())


def test_prepare_linear_copies():
    weight = torch.ones(4, 16)
    layer = ops.prepare_linear(weight)
    weight.zero_()
    assert layer.weight.count_nonzero() == 64


@pytest.fixture
def fickle_tiles(monkeypatch):
    """A library whose bits depend on a row's place: row i is off by i units in the last place."""
    honest = tiles._by_tiles

    def by_tiles(x, weight):
        out = honest(x, weight)
        place = torch.arange(out.shape[0], dtype=torch.int32).remainder(tiles.TILE_ROWS)
        return (out.view(torch.int32) + place.unsqueeze(1)).view(torch.float32)

    monkeypatch.setattr(tiles, "_by_tiles", by_tiles)
    monkeypatch.setattr(tiles, "_trials", {})


def test_a_fickle_library_is_found_out_and_called_row_by_row(fickle_tiles, monkeypatch):
    said = []
    monkeypatch.setattr(tiles.logger, "warning", lambda text, *a: said.append(text % a))
    weight = torch.randn(24, 32)
    layer = ops.prepare_linear(weight)
    again = ops.prepare_linear(weight)
    assert not layer.tiled and not again.tiled
    assert len(said) == 1 and "weights 24 x 32" in said[0]
    x = torch.randn(19, 32)
    got = ops.linear(x, layer)
    torch.testing.assert_close(got, x @ weight.t())
    assert same(rows_alone(lambda row: ops.linear(row, layer), x), got)


def test_every_operation_is_in_the_table_and_selectable():
    assert select("reference") == "reference"
    assert ops.name == "reference"
    assert ops.linear is reference.OPS["linear"]
    with pytest.raises(AttributeError, match="no operation 'convolve'"):
        _ = ops.convolve


def test_an_unknown_implementation_is_refused():
    from quire.errors import ConfigError

    with pytest.raises(ConfigError, match="got 'referense'; did you mean 'reference'"):
        select("referense")
