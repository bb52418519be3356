"""The compiled sum over experts gives the bits of its plain twin, which adds expert by expert."""

import pytest
import torch

from kernel_kit import needs_native, same
from quire.kernels import compiled, dispatch, moe
from quire.kernels.moe import ExpertWeights, Routing

pytestmark = needs_native


@pytest.fixture(params=compiled.available_isas())
def ops(request):
    before, threads = compiled.lib.isa(), compiled.lib.num_threads()
    table = dispatch.choose("native")
    compiled.lib.set_isa(request.param)
    yield table
    compiled.lib.set_isa(before)
    compiled.lib.set_num_threads(threads, [])


def made(*size, dtype=torch.float32, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def experts_of(ops, count, size, inner, leaves, dtype, bias):
    return [
        ExpertWeights(
            ops.prepare_linear(made(2 * inner, size, dtype=dtype, seed=i)),
            ops.prepare_linear(
                made(size, inner, dtype=dtype, seed=50 + i),
                made(size, dtype=dtype, seed=90 + i) if bias else None,
                leaves=leaves,
            ),
        )
        for i in range(count)
    ]


def both(ops, x, layers, top_k, favourite=0.0):
    """What the compiled call and the twin make of rows; some like the first expert best."""
    logits = made(len(x), len(layers), seed=7)
    logits[:, 0] += favourite
    weights, experts = moe.route_experts(logits, None, Routing(len(layers), top_k))
    given = x, weights, experts, layers, ops.silu_and_mul
    return ops.grouped_experts(*given), moe.grouped_experts(*given, ops=ops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("size", "inner", "leaves"), [(40, 128, 2), (130, 256, 4), (64, 66, 1)])
def test_small_layers(ops, dtype, bias, size, inner, leaves):
    """Widths that fill no tile, an inner size that fills no leaf evenly, experts without rows."""
    layers = experts_of(ops, 5, size, inner, leaves, dtype, bias)
    for rows in (1, 2, 23):
        got, want = both(ops, made(rows, size, dtype=dtype, seed=3) / 4, layers, 2)
        assert same(got, want)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [513, 1500])
def test_long_prompts(ops, rows, threads):
    """More rows than are summed at a time, several tiles at a time, more than a panel of one
    expert."""
    compiled.lib.set_num_threads(threads, [])
    layers = experts_of(ops, 3, 1100, 128, 8, torch.bfloat16, True)
    x = made(rows, 1100, dtype=torch.bfloat16, seed=3) / 30
    got, want = both(ops, x, layers, 2, favourite=4.0)
    assert same(got, want)


def test_no_rows(ops):
    layers = experts_of(ops, 3, 40, 64, 1, torch.float32, True)
    assert both(ops, made(0, 40), layers, 2)[0].shape == (0, 40)
