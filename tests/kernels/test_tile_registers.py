"""Products of bf16 numbers on tile registers, bit by bit against their arithmetic written out
(csrc/tile_registers.h), whatever the number of rows and however a weight is cut."""

import numpy as np
import pytest
import torch

from kernel_kit import needs_native, same
from quire.kernels import compiled, native_linear

STEP = 32
"""Columns of k whose products one instruction adds."""

pytestmark = [
    needs_native,
    pytest.mark.skipif("amx" not in compiled.available_isas(), reason="no tile registers here"),
]


@pytest.fixture(autouse=True)
def tiles():
    before = compiled.lib.isa()
    assert compiled.lib.set_isa("amx")
    yield
    compiled.lib.set_isa(before)


def rounded(x):
    """To float32, kept in double precision: numbers here need no more than its 53 bits."""
    return x.astype(np.float32).astype(np.float64)


def leaf_sums(x, weight):
    """`[T, N]`: steps from the first column on; even and odd columns of each on their own."""
    total = np.zeros((x.shape[0], weight.shape[0]))
    for begin in range(0, x.shape[1], STEP):
        halves = []
        for odd in (0, 1):
            half = np.zeros_like(total)
            for k in range(begin + odd, min(begin + STEP, x.shape[1]), 2):
                half = rounded(half + x[:, k, None] * weight[None, :, k])
            halves.append(half)
        total = rounded(total + rounded(halves[0] + halves[1]))
    return total


def written_out(x, weight, bias, leaves):
    sums = [
        leaf_sums(piece.double().numpy(), part.double().numpy())
        for piece, part in zip(x.chunk(leaves, 1), weight.chunk(leaves, 1), strict=True)
    ]
    while len(sums) > 1:
        sums = [rounded(a + b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
    total = sums[0] if bias is None else rounded(sums[0] + bias.double().numpy())
    return torch.from_numpy(total).float()


def numbers(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


SHAPES = [
    (64, 32, 1),
    (70, 2, 1),
    (64, 33, 1),
    (130, 896, 8),
    (65, 1000, 1),
    (64, 2400, 4),
    (64, 96, 2),
]
"""N, K, leaves: leaves that end within a step, blocks that end within a leaf, an odd K."""


@pytest.mark.parametrize(("n", "k", "leaves"), SHAPES)
def test_every_bit_is_what_is_written_out(n, k, leaves):
    weight, bias = numbers(n, k, seed=n + k), numbers(n, seed=n)
    layer = native_linear.prepare_linear(weight, bias, leaves=leaves)
    x = numbers(70, k, seed=k)
    want = written_out(x, weight, bias, leaves)
    # 34, 40 and 67 are not so many passes of the same size: the last ones pass by with rows before
    # them.
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 34, 40, 48, 67, 70):
        got = native_linear.linear(x[:rows], layer, torch.float32)
        assert same(got, want[:rows]), rows


def test_rows_of_more_than_one_panel():
    weight = numbers(64, 2080, seed=5)
    layer = native_linear.prepare_linear(weight, None)
    x = numbers(1100, 2080, seed=6)
    got = native_linear.linear(x, layer, torch.float32)
    picked = [0, 15, 16, 511, 512, 543, 1023, 1099]
    assert same(got[picked], written_out(x[picked], weight, None, 1))


def test_what_a_tile_reads_ends_with_its_rows():
    """Beyond the last row and the last column stand numbers that would make all others NaN."""
    weight = numbers(64, 80, seed=1)
    layer = native_linear.prepare_linear(weight, None)
    around = torch.full((24, 112), float("nan"), dtype=torch.bfloat16)
    around[:19, :80] = numbers(19, 80, seed=2)
    x = around[:19, :80]
    got = native_linear.linear(x, layer, torch.float32)
    assert same(got, written_out(x, weight, None, 1))


def test_a_number_that_is_not_finite_stays_in_its_row():
    weight = numbers(64, 160, seed=3)
    layer = native_linear.prepare_linear(weight, None)
    x = numbers(20, 160, seed=4)
    want = native_linear.linear(x, layer, torch.float32)
    x[7, 100] = float("inf")
    got = native_linear.linear(x, layer, torch.float32)
    assert not torch.isfinite(got[7]).any()
    others = [row for row in range(20) if row != 7]
    assert same(got[others], want[others])
