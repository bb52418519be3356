"""Norms, activations and rotary forms of the families: right, and each row on its own."""

import pytest
import torch

from kernel_kit import same
from quire.kernels import dispatch, reference
from quire.kernels.dispatch import ops, select

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def check(function, x, want):
    """Near `want`; and rows alone, in another order and in other company have the same bits."""
    got = function(x)
    assert got.dtype == x.dtype
    near = TOLERANCE[x.dtype]
    torch.testing.assert_close(got.double(), want, atol=near, rtol=near)
    alone = torch.cat([function(x[i : i + 1]) for i in range(len(x))])
    assert same(alone, got)
    order = torch.randperm(len(x))
    assert same(function(x[order]), got[order])
    assert same(function(x[2:5]), got[2:5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", ["both", "weight", "none", "per head"])
def test_layer_norm(dtype, parts):
    x = (torch.randn(9, 3, 37) * 3 + 1).to(dtype)
    size = (3, 37) if parts == "per head" else (37,)
    weight = None if parts == "none" else torch.randn(size).to(dtype)
    bias = torch.randn(size).to(dtype) if parts == "both" else None
    want = torch.nn.functional.layer_norm(x.double(), (37,), eps=1e-5)
    want = want if weight is None else want * weight.double()
    want = want if bias is None else want + bias.double()
    check(lambda rows: ops.layer_norm(rows, weight, bias, 1e-5), x, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_wide_is_rounded_once(dtype):
    x, weight = torch.randn(9, 37).to(dtype), 1 + 0.01 * torch.randn(37)
    wide = x.double()
    want = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    check(lambda rows: ops.rms_norm_wide(rows, weight, 1e-6), x, want)
    if dtype != torch.float32:
        exact = ops.rms_norm_wide(x.float(), weight, 1e-6).to(dtype)
        assert same(ops.rms_norm_wide(x, weight, 1e-6), exact)
        assert not same(ops.rms_norm(x, weight, 1e-6), exact)


ACTIVATIONS = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, dtype):
    x = (torch.randn(9, 41) * 4).to(dtype)
    check(getattr(ops, name), x, ACTIVATIONS[name](x.double()))
    edges = torch.tensor([[0.0, -0.0, 300.0, -300.0, torch.nan]], dtype=dtype)
    y = getattr(ops, name)(edges)[0]
    assert y[:4].abs().tolist() == [0.0, 0.0, 300.0, 0.0]
    assert y[4].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gates(name, dtype):
    x = (torch.randn(9, 2 * 41) * 2).to(dtype)
    gate, up = x.double().chunk(2, -1)
    check(getattr(ops, f"{name}_and_mul"), x, ACTIVATIONS[name](gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 20])
def test_rotary_partial(dtype, interleaved, rotated):
    q, k = torch.randn(9, 4, 20).to(dtype), torch.randn(9, 2, 20).to(dtype)
    positions, table = torch.randint(0, 50, (9,)), torch.randn(50, rotated)
    got = ops.rotary_partial(q, k, positions, table, interleaved)
    half = rotated // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    for x, y in zip((q, k), got, strict=True):
        want = x.double()
        for i, (a, b) in enumerate(pairs):
            cos = table[positions, i].double().unsqueeze(1)
            sin = table[positions, half + i].double().unsqueeze(1)
            want[..., a] = x[..., a].double() * cos - x[..., b].double() * sin
            want[..., b] = x[..., b].double() * cos + x[..., a].double() * sin
        near = TOLERANCE[dtype]
        torch.testing.assert_close(y.double(), want, atol=near, rtol=near)
        assert same(y[..., rotated:], x[..., rotated:])
    rows = [
        ops.rotary_partial(q[i : i + 1], k[i : i + 1], positions[i : i + 1], table, interleaved)
        for i in range(9)
    ]
    assert same(torch.cat([row[0] for row in rows]), got[0])
    if rotated == 20 and not interleaved:
        assert same(ops.rotary(q, k, positions, table)[0], got[0])


def test_what_an_implementation_lacks_the_reference_does(monkeypatch):
    partly = dispatch.Implementation({"relu": lambda x: x})
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS._rows, "partly", partly)
    monkeypatch.setattr(dispatch, "_tables", dict(dispatch._tables))
    before = ops.name
    try:
        select("partly")
        assert ops.relu is partly.ops["relu"]
        assert ops.silu is reference.silu
    finally:
        select(before)
    assert ops.name == before
