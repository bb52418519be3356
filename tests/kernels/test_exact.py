"""exp, log and sums: accurate, and equal bits for equal inputs wherever they stand."""

import math

import pytest
import torch

from quire.kernels import exact
from quire.kernels.exact import erf, exp, log, log_softmax, log_wide, tanh, tree_sum


def bits(x):
    return x.contiguous().view(torch.int32)


def spread(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(n, generator=generator) - 0.5) * 174


def ulps(got, want):
    return (bits(got).long() - bits(want.to(torch.float32)).long()).abs().max().item()


def test_exp_is_within_two_ulps_over_its_range():
    x = torch.cat([spread(400_000), torch.linspace(-86.9, 88.7, 100_001), torch.randn(100_000)])
    x = x[(x > -86.9) & (x < 88.72)]
    assert ulps(exp(x), x.double().exp()) <= 2


def test_exp_at_the_edges():
    x = torch.tensor([0.0, -0.0, -torch.inf, -1e30, -88.0, -87.0, torch.inf, 1e30, 89.0, torch.nan])
    y = exp(x)
    assert y[:2].tolist() == [1.0, 1.0]
    assert bits(y[2:6]).tolist() == [0, 0, 0, 0]
    assert y[6:9].tolist() == [torch.inf] * 3
    assert y[9].isnan()
    assert exp(torch.tensor([88.72])).item() < torch.inf


@pytest.mark.parametrize("function", [exp, tanh, erf, lambda x: log(x.abs())])
def test_an_element_does_not_know_its_place(function):
    x = spread(70_001)
    whole = function(x)
    for start, stop in ((0, 1), (1, 2), (3, 20), (70_000, 70_001), (32_760, 32_780), (5, 40_000)):
        assert torch.equal(bits(function(x[start:stop])), bits(whole[start:stop]))
    assert torch.equal(bits(function(x[::3])), bits(whole[::3]))
    assert torch.equal(
        bits(function(x[:70_000].view(100, 700).t())).t().reshape(-1), bits(whole[:-1])
    )


def test_exp_leaves_its_argument_alone():
    x = spread(100)
    before = x.clone()
    exp(x)
    assert torch.equal(x, before)


def test_log_is_correctly_rounded_and_right_at_the_edges():
    x = torch.cat([exp(spread(200_000)), torch.rand(100_000), torch.tensor([1e-44, 3e38, 1.0])])
    assert ulps(log(x), x.double().log()) <= 1
    y = log(torch.tensor([0.0, torch.inf, 1.0, -1.0, torch.nan]))
    assert y[:3].tolist() == [-torch.inf, torch.inf, 0.0]
    assert y[3:].isnan().all()


def test_log_wide_is_right_near_1_too():
    u = torch.rand(50_000, dtype=torch.float64)
    small = 2.0 ** -torch.arange(1.0, 53.0, dtype=torch.float64)
    x = torch.cat([u, 1 - u * 1e-6, 1 - small, small, 1 + small[:-1], small * 1.7])
    got, want = log_wide(x), torch.tensor([math.log(v) for v in x.tolist()], dtype=torch.float64)
    spacing = torch.nextafter(want.abs(), torch.tensor(torch.inf, dtype=torch.float64)) - want.abs()
    assert bool(((got - want).abs() <= 3 * spacing).all())
    assert torch.equal(got, torch.cat([log_wide(part) for part in x.split(7)]))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 48, 64, 97, 1000])
def test_tree_sum_depends_on_the_row_only(length):
    x = torch.randn(37, length)
    sums = tree_sum(x)
    torch.testing.assert_close(sums, x.double().sum(-1).float())
    for row in range(37):
        assert torch.equal(bits(tree_sum(x[row : row + 1])), bits(sums[row : row + 1]))
        assert torch.equal(bits(tree_sum(x[row])), bits(sums[row]))
    assert torch.equal(bits(tree_sum(x.t().contiguous(), dim=0)), bits(sums))


def test_tree_sum_ignores_appended_zeros_and_keeps_its_argument():
    x = torch.randn(5, 300)
    before = x.clone()
    padded = torch.cat([x, torch.zeros(5, 700)], dim=1)
    assert torch.equal(bits(tree_sum(padded)), bits(tree_sum(x)))
    assert torch.equal(x, before)


def test_log_softmax_is_right_and_row_wise():
    logits = torch.randn(70, 20_011) * 5
    logits[3, :20_000] = -torch.inf
    got = log_softmax(logits)
    torch.testing.assert_close(got, logits.double().log_softmax(-1).float(), atol=2e-6, rtol=2e-6)
    for rows in (slice(0, 1), slice(3, 4), slice(10, 63), slice(69, 70)):
        assert torch.equal(bits(log_softmax(logits[rows])), bits(got[rows]))
    assert torch.equal(bits(log_softmax(logits.flip(0))), bits(got.flip(0)))
    assert log_softmax(torch.zeros(0, 5)).shape == (0, 5)


@pytest.mark.parametrize(("function", "limit"), [("tanh", 2), ("erf", 4)])
def test_tanh_and_erf(function, limit):
    ours, theirs = getattr(exact, function), getattr(torch, function)
    x = torch.cat([torch.linspace(-12, 12, 300_001), torch.randn(100_000) * 1e-3])
    y = ours(x)
    assert ulps(y, theirs(x.double())) <= limit
    assert torch.equal(bits(ours(-x)), bits(-y))
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    assert bits(ours(edges))[:4].tolist() == bits(torch.tensor([0.0, -0.0, 1.0, -1.0])).tolist()
    assert ours(edges)[4].isnan()
