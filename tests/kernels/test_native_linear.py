"""Compiled linear layers, norms and packing, on every instruction set this machine has: against
float64 by relative norm, against the plain twins, and bit by bit whatever the company."""

import random

import pytest
import torch

from kernel_kit import error, on_every_isa, same
from quire.kernels import compiled, native_linear, reference
from quire.kernels.rows import largest_columns

pytestmark = on_every_isa

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Relative norm of the error against float64: rounding of the result, and of sums."""
SIZES = [(1, 1), (64, 64), (63, 65), (130, 257), (896, 80), (33, 2049), (257, 4100)]


def made(n, k, dtype, seed=0, bias=True, gated=False):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    shift = torch.randn(n, generator=generator).to(dtype) if bias else None
    return weight, shift, native_linear.prepare_linear(weight, shift, gated=gated)


def inputs(rows, k, dtype, seed=1):
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_vocabulary_that_fills_no_tile():
    """GPT-2's 50257 logits from a width that is no multiple of a tile either."""
    weight, _, layer = made(50257, 80, torch.bfloat16, bias=False)
    x = inputs(3, 80, torch.bfloat16)
    got = native_linear.linear(x, layer, torch.float32)
    assert got.shape == (3, 50257)
    assert error(got, x.double() @ weight.double().t()) < LIMIT[torch.float32]
    assert same(native_linear.linear(x[2:], layer, torch.float32), got[2:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_linear_against_float64(dtype, n, k):
    weight, bias, layer = made(n, k, dtype)
    for rows in (1, 5, 6, 7, 8, 100):
        x = inputs(rows, k, dtype)
        want = x.double() @ weight.double().t() + bias.double()
        assert error(native_linear.linear(x, layer), want) < LIMIT[dtype]
        wide = native_linear.linear(x, layer, torch.float32)
        assert error(wide, want) < LIMIT[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_any_two_types(dtype, weight_dtype):
    weight, bias, layer = made(70, 90, weight_dtype)
    x = inputs(9, 90, dtype)
    want = x.double() @ weight.double().t() + bias.double()
    assert error(native_linear.linear(x, layer, torch.float32), want) < LIMIT[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (130, 257), (200, 2500)])
def test_a_row_is_the_same_in_any_company(dtype, n, k):
    """Any number of rows, any place, one thread or two: the same bits."""
    _, _, layer = made(n, k, dtype)
    x = inputs(230, k, dtype)
    want = native_linear.linear(x, layer)
    rng = random.Random(n)
    for threads in (1, 2):
        compiled.lib.set_num_threads(threads, [])
        for _ in range(12):
            picked = rng.sample(range(230), rng.choice([1, 2, 3, 5, 6, 7, 8, 13, 48, 49, 97, 200]))
            assert same(native_linear.linear(x[picked], layer), want[picked])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 3), (64, 64), (130, 257), (515, 2100)])
def test_likeliest_is_the_first_of_the_largest(dtype, n, k):
    """The columns that `linear` makes and the plain twin finds, whatever the company and threads.

    Equal columns, numbers far below the zeros that fill up a tile, and rows with a NaN or an
    infinity among them.
    """
    generator = torch.Generator().manual_seed(k)
    weight = torch.randn(n // 3 + 1, k, generator=generator).to(dtype).repeat(3, 1)[:n]
    shift = torch.full((n,), -9999.0).to(dtype)
    x = inputs(200, k, dtype)
    x[7, 1], x[12, 0], x[40, 2] = torch.nan, torch.inf, -torch.inf
    for bias in (shift, None):
        layer = native_linear.prepare_linear(weight, bias)
        want = largest_columns(native_linear.linear(x, layer, torch.float32))
        assert want[[7, 12, 40]].tolist() == [-1] * 3 and (want >= 0).sum() == 197
        assert (want.unique() < n // 3 + 1).all(), "a later one of equals"
        for threads in (1, 2):
            compiled.lib.set_num_threads(threads, [])
            for some in ([0], [7], list(range(5, 14)), list(range(33)), list(range(200))):
                assert torch.equal(native_linear.likeliest(x[some], layer), want[some])
    prepared = reference.prepare_linear(weight, None)
    found = reference.likeliest(x[:2], prepared)
    assert torch.equal(found, reference.linear(x[:2], prepared, torch.float32).argmax(1))
    assert native_linear.likeliest(x[:0], layer).tolist() == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_stand_apart(dtype):
    _, _, layer = made(65, 40, dtype)
    x = inputs(9, 40, dtype)
    wide = torch.randn(9, 100).to(dtype)
    wide[:, 13:53] = x
    assert same(native_linear.linear(wide[:, 13:53], layer), native_linear.linear(x, layer))
    assert same(native_linear.linear(x.t().contiguous().t(), layer), native_linear.linear(x, layer))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", sorted(native_linear.ACTIVATIONS.keys() - {"none"}))
@pytest.mark.parametrize("inner", [32, 33, 80, 500])
def test_gated_linear(dtype, activation, inner):
    weight, bias, layer = made(2 * inner, 70, dtype, gated=True)
    x = inputs(11, 70, dtype)
    gate, up = (x.double() @ weight.double().t() + bias.double()).chunk(2, -1)
    f = torch.nn.functional
    act = {
        "silu": f.silu,
        "gelu": f.gelu,
        "gelu_tanh": lambda t: f.gelu(t, approximate="tanh"),
    }[activation]
    got = native_linear.gated_linear(x, layer, activation)
    assert error(got, act(gate) * up) < LIMIT[dtype]
    twin = reference.gated_linear(x, reference.prepare_linear(weight, bias), activation)
    assert error(got, twin) < 2 * LIMIT[dtype]
    for i in range(11):
        assert same(native_linear.gated_linear(x[i : i + 1], layer, activation), got[i : i + 1])
    apart = native_linear.linear(x, layer)
    assert error(apart, torch.cat((gate, up), -1)) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_add_rounds_once_and_writes_in_place(dtype):
    weight, bias, layer = made(130, 70, dtype)
    x, residual = inputs(9, 70, dtype), inputs(9, 130, dtype, 7)
    want = x.double() @ weight.double().t() + bias.double() + residual.double()
    twin = reference.linear_add(x, reference.prepare_linear(weight, bias), residual.clone())
    got = native_linear.linear_add(x, layer, total := residual.clone())
    assert got is total
    assert error(got, want) < LIMIT[dtype]
    assert error(got, twin) < LIMIT[dtype]
    for i in range(9):
        alone = native_linear.linear_add(x[i : i + 1], layer, residual[i : i + 1].clone())
        assert same(alone, got[i : i + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 50, 64, 80, 896, 2049])
def test_rms_norm(dtype, size):
    x, weight = inputs(35, size, dtype), inputs(1, size, dtype, 3)[0]
    wide = x.double()
    want = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    got = native_linear.rms_norm(x, weight, 1e-6)
    assert error(got, want) < LIMIT[dtype]
    assert error(got, reference.rms_norm(x, weight, 1e-6)) < LIMIT[dtype]
    for i in (0, 17, 34):
        assert same(native_linear.rms_norm(x[i : i + 1], weight, 1e-6), got[i : i + 1])
    other = inputs(35, size, dtype, 9)
    normed, total = native_linear.rms_norm_add(x, other, weight, 1e-6)
    assert same(total, x + other)
    assert same(normed, native_linear.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 50, 80, 896, 2049])
def test_wide_and_layer_norms(dtype, size):
    x, weight, bias = (
        inputs(35, size, dtype),
        inputs(1, size, dtype, 3)[0],
        inputs(1, size, dtype)[0],
    )
    wide = x.double()
    rms = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    for scale in (weight, weight.float()):
        got = native_linear.rms_norm_wide(x, scale, 1e-6)
        assert error(got, rms * weight.double()) < LIMIT[dtype]
        assert error(got, reference.rms_norm_wide(x, scale, 1e-6)) < LIMIT[dtype]
        assert same(native_linear.rms_norm_wide(x[9:11], scale, 1e-6), got[9:11])
    for scale, shift in ((weight, bias), (weight, None), (None, bias), (None, None)):
        got = native_linear.layer_norm(x, scale, shift, 1e-3)
        twin = reference.layer_norm(x, scale, shift, 1e-3)
        assert torch.linalg.norm((got - twin).double()) <= LIMIT[dtype] * torch.linalg.norm(
            twin.double() + (0 if size > 1 else 1)
        )
        assert same(native_linear.layer_norm(x[9:11], scale, shift, 1e-3), got[9:11])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_packing_keeps_or_rounds_the_numbers(dtype, source):
    """Reading a packed weight back gives what torch's conversion gives."""
    weight = torch.randn(131, 71).to(source)
    weight[0, :4] = torch.tensor([0.0, -0.0, 1e-7, 60000.0]).to(source)
    layer = native_linear.prepare_linear(weight, dtype=dtype)
    ids = torch.randperm(131)
    assert same(native_linear.embedding_of(ids, layer, dtype), weight.to(dtype)[ids])
    twin = reference.prepare_linear(weight, dtype=dtype)
    assert same(
        native_linear.embedding_of(ids, layer, torch.float32),
        reference.embedding_of(ids, twin, torch.float32),
    )


def test_kept_memory_is_used_again():
    _, _, layer = made(64, 64, torch.float32)
    x = inputs(3, 64, torch.float32)
    first = native_linear.linear(x, layer, keep="a test")
    again = native_linear.linear(x, layer, keep="a test")
    assert first.data_ptr() == again.data_ptr()
    assert native_linear.linear(x, layer).data_ptr() != first.data_ptr()


def test_not_a_number_stays_in_its_row():
    _, _, layer = made(70, 64, torch.bfloat16)
    x = inputs(8, 64, torch.bfloat16)
    want = native_linear.linear(x, layer)
    x[3, 5] = float("nan")
    got = native_linear.linear(x, layer)
    assert got[3].isnan().all()
    keep = [0, 1, 2, 4, 5, 6, 7]
    assert same(got[keep], want[keep])
