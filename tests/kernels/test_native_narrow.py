"""Compiled products of weights that become numbers: the bits of the product of those numbers, on
every instruction set. Of 8-bit floats: those of the sums of groups times their scales."""

import pytest
import torch

from kernel_kit import error, on_every_isa, same
from quire.kernels import coded_linear, native_linear, reference
from quire.kernels.dispatch import choose
from quire.kernels.exact import sum_neighbours
from quire.kernels.moe import ExpertWeights, grouped_experts
from quire.kernels.native_coded import PackedCoded
from quire.kernels.native_experts import grouped_experts as fast_experts
from quire.kernels.native_narrow import can_pack_narrow
from test_coded import made

pytestmark = on_every_isa

CASES = [
    # kind, group, zeros, N, K, leaves
    ("e4m3", 896, False, 200, 896, 8),
    ("e4m3", 128, False, 130, 1000, 1),
    ("e4m3", 32, False, 64, 2048, 2),
    ("e4m3", 77, False, 65, 77, 1),
    ("e5m2", 64, False, 70, 192, 1),
    ("e2m1", 32, False, 200, 896, 4),
    ("e2m1", 16, False, 96, 128, 2),
    ("nf4", 64, False, 130, 512, 8),
    ("nf4", 33, False, 40, 33, 1),
    ("fp4", 48, False, 64, 100, 1),
    ("iq4_nl", 32, False, 64, 128, 1),
    ("int8", 100, True, 70, 100, 1),
    ("int8", 32, False, 64, 256, 2),
    ("int4", 128, True, 64, 1000, 1),
    ("int4", 128, False, 80, 256, 1),
    ("int4 minima", 32, False, 64, 288, 1),
    ("int8 minima", 16, True, 70, 96, 1),
]
"""Groups that end early or lie across leaves and blocks, odd columns, tiles that are not full."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(kind, group, zeros, n, k, leaves, *, powers=False, small=False):
    """With `small`, codes and scales whose products and sums are exact."""
    del leaves
    kind, _, minima = kind.partition(" ")
    coded = made(kind, group, zeros, "float", seed=n + k, n=n, k=k, minima=bool(minima))
    if powers:
        coded.scales.copy_(torch.exp2(coded.scales.mul(40).sub(20).round()))
        coded.scales[0] = 0
    if small and kind in ("e4m3", "e5m2"):
        coded.codes.copy_(coded.codes.float().mul(2).round().clamp(-4, 4))
        coded.scales.copy_(torch.exp2(coded.scales.mul(4).round()))
    return coded


EXACT = [case for case in CASES if not case[0].startswith("e")] + [CASES[5], CASES[6]]
FLOATS8 = [case for case in CASES if case not in EXACT]


class Scaled:
    """The definition, each sum of a group by the compiled product of numbers."""

    def __init__(self, coded, bias, leaves, dtype):
        values, k, self.bias, self.leaves = coded.values(), coded.shape[1], bias, []
        for begin in range(0, k, k // leaves):
            cuts = sorted({begin, begin + k // leaves, *range(0, k, coded.group)})
            cuts = [cut for cut in cuts if begin <= cut <= begin + k // leaves]
            self.leaves.append([
                (a, b, native_linear.prepare_linear(values[:, a:b], dtype=dtype),
                 coded.scales[:, a // coded.group])
                for a, b in zip(cuts, cuts[1:], strict=False)
            ])  # fmt: skip

    def __call__(self, x, out):
        sums = []
        for leaf in self.leaves:
            total = torch.zeros(len(x), len(leaf[0][3]))
            for a, b, codes, scales in leaf:
                part = native_linear.linear(x[:, a:b].contiguous(), codes, torch.float32)
                total += part * scales
            sums.append(total)
        whole = sum_neighbours(sums)
        return (whole if self.bias is None else whole + self.bias.to(whole.dtype)).to(out)


def both(case, dtype, *, bias=True, gated=False, powers=False, small=False):
    coded = weight(*case, powers=powers, small=small)
    shift = torch.randn(case[3]) if bias else None
    how = {"gated": gated, "leaves": case[5], "dtype": dtype}
    fast = native_linear.prepare_coded(coded, shift, **how)
    assert isinstance(fast, PackedCoded)
    return fast, native_linear.prepare_linear(coded.dequantise(), shift, **how)


def rows(count, k, dtype=torch.float32, seed=1):
    return torch.randn(count, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def few_bits(count, k):
    """Whole numbers, so that sums of small codes are exact in any order."""
    return rows(count, k).mul(2).round().bfloat16()


@pytest.mark.parametrize("case", FLOATS8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_are_multiplied_with_sums(case, dtype):
    coded, bias = weight(*case), torch.randn(case[3]).to(dtype)
    fast = native_linear.prepare_coded(coded, bias, leaves=case[5], dtype=dtype)
    assert isinstance(fast, PackedCoded)
    wanted = Scaled(coded, bias, case[5], dtype)
    plain = coded_linear.prepare_coded(coded, bias, leaves=case[5], dtype=dtype)
    for count in (*range(1, 14), 20, 25, 60, 100, 200):
        x = rows(count, case[4], dtype)
        for out in (dtype, torch.float32):
            assert same(native_linear.linear(x, fast, out), wanted(x, out))
        got = native_linear.linear(x, fast, torch.float32)
        assert error(got, reference.linear(x, plain, torch.float32)) < 1e-6


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[2]], ids=str)
@pytest.mark.parametrize("largest", [2.0**-126, 2.0**-3, 2.0**5.5, 2.0**7, 2.0**98, 2.0**121])
def test_rows_of_small_and_huge_numbers(largest, case):
    """Nothing on the way is larger than it has to be. Numbers of e4m3 are perhaps made too small,
    and rows larger for it, where none of them reaches 2**7."""
    coded = weight(*case)
    coded.codes.copy_(coded.codes.float().mul(2.0**-6))
    fast = native_linear.prepare_coded(coded, leaves=case[5], dtype=torch.bfloat16)
    wanted = Scaled(coded, None, case[5], torch.bfloat16)
    x = rows(19, case[4]).clamp(-3, 3).mul(largest).bfloat16()
    x[4:9] = x[4:9].clamp(-100, 100)
    for some in (x[:1], x[:2], x[:3], x[4:8], x[:5], x[5:6], x[6:8], x[:18], x):
        got = native_linear.linear(some.contiguous(), fast, torch.float32)
        assert got.isfinite().all() and same(got, wanted(some.contiguous(), torch.float32))


@pytest.mark.parametrize("case", EXACT, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_is_that_of_the_numbers(case, dtype):
    fast, wide = both(case, dtype)
    for count in (*range(1, 14), 20, 25, 60, 100, 200):
        x = rows(count, case[4], dtype)
        for out in (dtype, torch.float32):
            assert same(native_linear.linear(x, fast, out), native_linear.linear(x, wide, out))


SHORT_GROUPS = ("e2m1", 16, False, 130, 128, 2)  # the second of its tiles has no zero


@pytest.mark.parametrize("case", [CASES[2], CASES[5], SHORT_GROUPS], ids=str)
def test_scales_that_are_powers_of_two_and_zero(case):
    fast, wide = both(case, torch.bfloat16, bias=False, powers=True)
    scaled = Scaled(weight(*case, powers=True), None, case[5], torch.bfloat16)
    # Half a byte or one for each code, one for each scale.
    bits = 4 if case[0] == "e2m1" else 8
    tiles = -(-case[3] // 64)
    assert fast.nbytes <= tiles * 64 * (case[4] * bits // 8 + case[4] // case[1]) + 64
    for count in (1, 9, 16, 17, 40):
        x = rows(count, case[4], torch.bfloat16)
        of_numbers = native_linear.linear(x, wide, torch.float32)
        wanted = of_numbers if case != CASES[2] else scaled(x, torch.float32)
        assert same(native_linear.linear(x, fast, torch.float32), wanted)


@pytest.mark.parametrize("ends", [(-20, 20), (-126, -124), (95, 99), (-126, 99)])
@pytest.mark.parametrize("case", [CASES[5], SHORT_GROUPS], ids=str)
def test_powers_of_two_at_the_ends_of_what_there_is(case, ends):
    """In some groups: those are made otherwise, and the sums of the others go on."""
    coded = weight(*case, powers=True)
    shape, order = coded.scales.shape, torch.Generator().manual_seed(3)
    some = torch.randint(ends[0], ends[1] + 1, shape, generator=order)
    usual = torch.randint(-8, 8, shape, generator=order)
    rare = torch.rand(shape, generator=order) < 0.01
    none = torch.where(rare, -torch.inf, usual)
    for mixed in (some, torch.where(rare, some, usual), none):
        coded.scales.copy_(torch.exp2(mixed.double()))
        how = {"leaves": case[5], "dtype": torch.bfloat16}
        fast = native_linear.prepare_coded(coded, None, **how)
        wide = native_linear.prepare_linear(coded.dequantise(), None, **how)
        assert fast.nbytes < 0.35 * wide.nbytes, "scales were meant to take a byte"
        for count in (*range(1, 14), 16, 40):
            x = rows(count, case[4], torch.bfloat16)
            wanted = native_linear.linear(x, wide, torch.float32)
            assert same(native_linear.linear(x, fast, torch.float32), wanted)


def test_every_code_of_eight_bits():
    for kind, count in (("e4m3", 254), ("e5m2", 248), ("int8", 256)):
        coded = weight(kind, 2, False, 64, 256, 1)
        every = torch.arange(256, dtype=torch.uint8)
        if kind != "int8":
            every = every[every.view(coded.codes.dtype).to(torch.float32).isfinite()]
        assert len(every) == count
        coded.codes.view(torch.uint8)[:, :count] = every
        fast = native_linear.prepare_coded(coded, dtype=torch.float32)
        eye = torch.eye(256)
        assert torch.equal(native_linear.linear(eye, fast), coded.dequantise().t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_notice_each_other(dtype):
    for case in (CASES[0], CASES[1], CASES[5], CASES[13]):
        fast, _ = both(case, dtype)
        x = rows(400, case[4], dtype)
        whole = native_linear.linear(x, fast)
        for count in (1, 2, 7, 19, 33):
            assert same(native_linear.linear(x[5 : 5 + count], fast), whole[5 : 5 + count])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_rest_of_what_a_layer_does(case):
    fast, wide = both(case, torch.bfloat16, small=True)
    n, k = case[3], case[4]
    x = few_bits(5, k)
    residual = rows(5, n, torch.bfloat16, seed=2)
    got = native_linear.linear_add(x, fast, residual.clone())
    assert same(got, native_linear.linear_add(x, wide, residual.clone()))
    x[2, 3] = torch.inf
    assert torch.equal(native_linear.likeliest(x, fast), native_linear.likeliest(x, wide))
    ids = torch.tensor([0, n - 1, 17])
    for dtype in (torch.float32, torch.bfloat16):
        got = native_linear.embedding_of(ids, fast, dtype)
        wanted = native_linear.embedding_of(ids, wide, dtype)
        # A code of four bits has no -0 when it is packed.
        assert same(got, wanted if case in FLOATS8 else wanted + 0.0)
        plain = reference.prepare_linear(
            weight(*case, small=True).dequantise(), dtype=torch.bfloat16
        )
        assert torch.equal(got, reference.embedding_of(ids, plain, dtype))


@pytest.mark.parametrize("case", [CASES[1], CASES[6]], ids=str)
def test_gates(case):
    fast, wide = both(case, torch.bfloat16, gated=True, small=True)
    x = few_bits(13, case[4])
    for activation in ("silu", "gelu", "gelu_tanh"):
        got = native_linear.gated_linear(x, fast, activation)
        assert same(got, native_linear.gated_linear(x, wide, activation))
    assert same(native_linear.linear(x, fast), native_linear.linear(x, wide))


def test_experts():
    ops, layers, plain = choose("native"), [], []
    for e in range(3):
        up = made("e2m1", 32, False, "float", n=128, k=96, seed=e)
        down = made("nf4", 16, False, "float", n=96, k=64, seed=9 + e)
        how = {"leaves": 2, "dtype": torch.bfloat16}
        layers.append(
            ExpertWeights(
                native_linear.prepare_coded(up, dtype=torch.bfloat16),
                native_linear.prepare_coded(down, **how),
            )
        )
        plain.append(
            ExpertWeights(
                native_linear.prepare_linear(up.dequantise(), dtype=torch.bfloat16),
                native_linear.prepare_linear(down.dequantise(), **how),
            )
        )
    x, weights = rows(20, 96, torch.bfloat16), torch.rand(20, 2)
    experts = torch.tensor([[0, 1], [1, 2]] * 10)
    found = [
        ways((x, weights, experts, some, ops.silu_and_mul))
        for ways in (
            lambda parts: fast_experts(*parts, ops=ops),
            lambda parts: grouped_experts(*parts, ops=ops),
        )
        for some in (layers, plain)
    ]
    assert all(same(one, found[0]) for one in found[1:])


def test_what_is_kept_is_the_same():
    fast, wide = both(CASES[7], torch.bfloat16)
    again = native_linear.restore_linear(native_linear.keep_linear(fast))
    x = rows(4, CASES[7][4], torch.bfloat16)
    assert same(native_linear.linear(x, again), native_linear.linear(x, wide))


def test_what_cannot_be_packed_is_kept_as_numbers():
    order = torch.arange(96).flip(0)
    turned = made(activations="float", order=order)
    odd = made("e4m3", 33, False, "float")
    for coded in (turned, odd):
        assert not can_pack_narrow(coded, 1)
        fast = native_linear.prepare_coded(coded, dtype=torch.bfloat16)
        wide = native_linear.prepare_linear(coded.dequantise(), dtype=torch.bfloat16)
        x = rows(3, 96, torch.bfloat16)
        assert same(native_linear.linear(x, fast), native_linear.linear(x, wide))
