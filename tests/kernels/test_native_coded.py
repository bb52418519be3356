"""Compiled products of codes against the plain ones: every bit, on every instruction set.

Only what comes after the sums (activation functions) may differ, as it does without codes.
"""

from dataclasses import replace

import pytest
import torch

from kernel_kit import error, on_every_isa, same
from quire.kernels import coded_linear, native_linear, reference
from quire.kernels.coded import KINDS, CodedWeight
from quire.kernels.dispatch import choose
from quire.kernels.moe import ExpertWeights, grouped_experts
from quire.kernels.native_coded import PackedCoded
from quire.kernels.native_experts import grouped_experts as fast_experts
from quire.kernels.packed import ELEMENT_CODES
from test_coded import made

pytestmark = on_every_isa

CASES = [
    # kind, group, zeros (or one that all have), N, K, leaves
    ("int8", 896, False, 200, 896, 8),
    ("int8", 100, True, 70, 100, 1),
    ("int8", 32, True, 64, 256, 2),
    ("int8", 112, False, 65, 896, 4),
    ("int4", 32, False, 200, 896, 4),
    ("int4", 32, True, 64, 288, 1),
    ("int4", 64, True, 130, 512, 8),
    ("int4", 128, True, 64, 1000, 1),
    ("int4", 144, True, 64, 144, 1),
    ("e2m1", 16, False, 96, 128, 2),
    ("iq4_nl", 32, False, 64, 128, 1),
    ("int4 minima", 32, False, 200, 896, 4),
    ("int4 minima", 16, True, 64, 288, 1),
    ("int8 minima", 32, False, 64, 256, 2),
    ("int8 minima", 100, True, 70, 100, 1),
    ("iq4_nl minima", 32, False, 64, 128, 1),
    ("int4", 32, 8, 200, 896, 4),
    ("int4", 128, 8, 130, 512, 1),
    ("int4", 48, 8, 64, 144, 1),
    ("int8", 32, -3, 64, 256, 2),
]
"""Groups that end early, columns and rows that fill no tile, one group, one leaf and many."""


def both(
    kind,
    group,
    zeros,
    n,
    k,
    leaves,
    *,
    bias=True,
    gated=False,
    dtype=None,
    order=False,
    scales=None,
):
    turned = torch.randperm(k, generator=torch.Generator().manual_seed(3)) if order else None
    kind, _, minima = kind.partition(" ")
    how = {"order": turned, "minima": bool(minima)}
    coded = made(kind, group, zeros, n=n, k=k, seed=n + k, **how)
    if scales is not None:
        least = None if minima == "" else scales(coded.minima)
        coded = replace(coded, scales=scales(coded.scales), minima=least)
    shift = torch.randn(n) if bias else None
    how = {"gated": gated, "leaves": leaves, "dtype": dtype}
    fast = native_linear.prepare_coded(coded, shift, **how)
    assert isinstance(fast, PackedCoded)
    return fast, coded_linear.prepare_coded(coded, shift, **how)


def rows(count, k, dtype=torch.float32, seed=1):
    return torch.randn(count, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("count", [1, 3, 5, 6, 8, 11, 20, 200])
def test_every_bit_is_the_twins(case, count):
    fast, plain = both(*case)
    x = rows(count, case[4])
    assert same(native_linear.linear(x, fast), reference.linear(x, plain))


@pytest.mark.parametrize(
    "case",
    [
        ("int8", 4864, False, 96, 4864, 1),
        ("int8", 11008, True, 64, 11008, 1),
        ("int8", 128, False, 64, 4864, 2),
        ("int4", 32, False, 96, 4864, 4),
        ("int4", 64, True, 64, 8960, 1),
        ("int4", 128, False, 64, 14336, 8),
    ],
    ids=str,
)
def test_any_few_rows_of_long_weights(case):
    """Sums wait in memory between blocks of a weight, whose length goes by the number of rows."""
    fast, plain = both(*case)
    x = rows(20, case[4])
    expected = reference.linear(x, plain)
    for count in range(1, 21):
        assert same(native_linear.linear(x[:count], fast), expected[:count]), count


@pytest.mark.parametrize("case", [case for case in CASES if case[1] < case[4]], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4, 6, 12, 20, 40])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16], ids=str)
def test_scales_of_two_bytes(case, count, kept):
    """Groups keep them in the shortest type that has them all: float16 has none of 2**-40."""
    small = 2.0**-40 if kept == torch.bfloat16 else 1.0
    fast, plain = both(*case, bias=False, scales=lambda some: (some * small).to(kept).float())
    assert fast.form.scale_type == ELEMENT_CODES[kept]
    x = rows(count, case[4])
    assert same(native_linear.linear(x, fast), reference.linear(x, plain))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_largest_codes_of_four_bits(group, count):
    """Their sums are the largest that a group can have, where some levels add in 16 bits first."""
    codes = torch.full((64, 256), KINDS["int4"].highest, dtype=KINDS["int4"].dtype)
    coded = CodedWeight("int4", codes, torch.ones(64, 256 // group), None, group, "int8")
    x = torch.ones(count, 256)
    got = native_linear.linear(x, native_linear.prepare_coded(coded, None))
    assert same(got, reference.linear(x, coded_linear.prepare_coded(coded, None)))
    torch.testing.assert_close(got, torch.full((count, 64), 256.0 * KINDS["int4"].highest))


LENGTHS = {
    "1": (1.0, True),
    "two bits less than float32 has": (1 + 2.0**-21, True),
    "one bit less": (1 + 2.0**-22, False),
    "the largest that is in reach": (-(2.0**100), True),
    "larger": (2.0**101, False),
    "a denormal": (3 * 2.0**-147, True),
    "the smallest": (2.0**-149, False),
}
"""A scale, and whether its products with whole numbers may take one step."""


@pytest.mark.parametrize("kind, group", [("int8", 128), ("int8", 144), ("int4", 32), ("int4", 128)])
@pytest.mark.parametrize("scale, short", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sums_times_scales_of_all_lengths(kind, group, scale, short, sign):
    """Codes as far from their zeros as can be: sums of groups of 144 are too large for one step."""
    n, k = 64, 4 * group
    least, most = KINDS[kind].lowest, KINDS[kind].highest
    codes = torch.full((n, k), most, dtype=KINDS[kind].dtype)
    codes[1::2] = least
    some = torch.Generator().manual_seed(1)
    codes[2::8] = torch.randint(least, most + 1, (8, k), generator=some).to(codes.dtype)
    zeros = torch.full((n, 4), least)
    zeros[1::2] = most
    coded = CodedWeight(kind, codes, torch.full((n, 4), scale), zeros, group, "int8")
    for one in (coded, replace(coded, zeros=torch.full((n, 4), least))):
        fast = native_linear.prepare_coded(one, None)
        assert fast.form.short_scales is (short and group < 144)
        x = sign * torch.ones(13, k)
        x[::3] = rows(5, k)
        x[1] = 0  # which has no codes of its own
        expected = reference.linear(x, coded_linear.prepare_coded(one, None))
        for count in (1, 2, 8, 13):
            assert same(native_linear.linear(x[:count], fast), expected[:count]), count


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[5], CASES[12]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_types_of_rows(case, dtype):
    fast, plain = both(*case, dtype=dtype)
    x = rows(9, case[4], dtype)
    got = native_linear.linear(x, fast)
    # Numbers that round to denormals become zero where bf16 products take them for zero.
    assert got.dtype == dtype and torch.equal(got, reference.linear(x, plain))
    wide = native_linear.linear(x, fast, torch.float32)
    assert same(wide, reference.linear(x, plain, torch.float32))


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[5], CASES[12]], ids=str)
def test_columns_in_another_order(case):
    fast, plain = both(*case, order=True)
    x = rows(7, case[4])
    assert same(native_linear.linear(x, fast), reference.linear(x, plain))
    ids = torch.tensor([0, 63, 5, case[3] - 1])
    got = native_linear.embedding_of(ids, fast, torch.float32)
    assert same(got, reference.embedding_of(ids, plain, torch.float32))


@pytest.mark.parametrize(
    "case",
    [
        ("int8", 96, True, 140, 96, 1),
        ("int4", 32, True, 140, 96, 1),
        ("int4 minima", 32, False, 140, 96, 1),
    ],
)
def test_gates(case):
    fast, plain = both(*case, gated=True)
    x = rows(13, 96)
    for activation in ("silu", "gelu", "gelu_tanh"):
        got = native_linear.gated_linear(x, fast, activation)
        assert error(got, reference.gated_linear(x, plain, activation)) < 1e-6
    assert same(native_linear.linear(x, fast), reference.linear(x, plain))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_rest_of_what_a_layer_does(case):
    fast, plain = both(*case)
    n, k = case[3], case[4]
    x = rows(5, k)
    x[2, 3] = torch.inf
    assert torch.equal(native_linear.likeliest(x, fast), reference.likeliest(x, plain))
    ids = torch.tensor([0, n - 1, 17])
    for dtype in (torch.float32, torch.bfloat16):
        got = native_linear.embedding_of(ids, fast, dtype)
        assert torch.equal(got, reference.embedding_of(ids, plain, dtype))
    residual = rows(5, n, seed=2)
    x[2, 3] = 0
    got = native_linear.linear_add(x, fast, residual.clone())
    assert same(got, reference.linear_add(x, plain, residual.clone()))


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4], CASES[11]], ids=str)
def test_leaves_of_experts(case):
    fast, plain = both(*case, bias=False)
    assert fast.leaves == plain.leaves
    x, shares = rows(6, case[4]), torch.rand(6)
    at = torch.tensor([4, 0, 9, 1, 3, 2])
    totals = [torch.ones(fast.leaves, 10, case[3]) for _ in range(2)]
    native_linear.add_leaves(x, fast, totals[0], at, shares)
    reference.add_leaves(x, plain, totals[1], at, shares)
    assert same(*totals)


def test_what_is_kept_is_the_same():
    fast, plain = both(*CASES[5], order=True)
    again = native_linear.restore_linear(native_linear.keep_linear(fast))
    x = rows(4, CASES[5][4])
    assert same(native_linear.linear(x, again), reference.linear(x, plain))


def test_rows_do_not_notice_each_other():
    for case in (CASES[0], CASES[4], CASES[11]):
        fast, _ = both(*case)
        x = rows(300, case[4])
        whole = native_linear.linear(x, fast)
        for count in (1, 2, 7, 19, 33):
            assert same(native_linear.linear(x[5 : 5 + count], fast), whole[5 : 5 + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("place", [0, 5, 40, 895, 899])
def test_rows_that_are_no_numbers_or_next_to_nothing(dtype, place):
    case = ("int8", 900, False, 200, 900, 1)  # beyond whole vectors of each type
    fast, plain = both(*case, dtype=dtype)
    x = rows(5, 900, dtype)
    x[0, place], x[1, place], x[4, place] = torch.nan, -torch.inf, -30000.0
    x[2] *= 1e-38
    got = native_linear.linear(x, fast, torch.float32)
    assert same(got[2:], reference.linear(x, plain, torch.float32)[2:])
    assert got[:2].isnan().all()


@pytest.mark.parametrize("orders", [False, True])
def test_experts_of_codes(orders):
    """With an order of columns for each expert, too: codes of rows are not the same for all."""
    ops, layers = choose("native"), []
    for e in range(3):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(e)) if orders else None
        up = native_linear.prepare_coded(made("int8", 64, False, n=128, k=64, seed=e))
        coded = made("int4", 32, True, n=64, k=64, seed=9 + e, order=order)
        layers.append(ExpertWeights(up, native_linear.prepare_coded(coded, leaves=2)))
    x, weights = rows(20, 64), torch.rand(20, 2)
    experts = torch.tensor([[0, 1], [1, 2]] * 10)
    parts = (x, weights, experts, layers, ops.silu_and_mul)
    assert same(fast_experts(*parts, ops=ops), grouped_experts(*parts, ops=ops))
