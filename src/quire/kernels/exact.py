"""Elementwise functions and sums whose bits do not depend on an element's place in a tensor.

torch computes exp, log and the like with vector code for the bulk of a tensor and other code for
its tail, and may split a sum between threads. Here everything is made of IEEE-exact elementwise
steps (add, multiply, divide, round, shift), each rounded on its own, and sums are trees whose
shape depends on the length only. So equal inputs give equal bits anywhere, on any device.

Knows nothing of models or attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor


def _number(value: float) -> Tensor:
    """A float32 constant. As a tensor it costs a third of what a Python number costs per use."""
    return torch.tensor(value, dtype=torch.float32)


_LOG2E: Final = _number(1.4426950408889634)
# ln 2 in two parts: the first has 9 significant bits, so its product with the (at most 8 bit)
# exponent is exact.
_LN2_HIGH: Final = _number(0.693359375)
_LN2_LOW: Final = _number(-2.12194440054690583e-4)
# Adding 1.5 * 2**23 rounds to a whole number and leaves it in the low bits. The 126 on top makes
# them the exponent field of 2**(n - 1).
_ROUND: Final = _number(1.5 * 2**23 + 126)
_EXPONENT_BITS: Final = torch.tensor(23, dtype=torch.int32)
# exp(r) = 1 + r + r^2 * P(r) on |r| <= ln(2)/2: the minimax polynomial of Cephes' expf.
_EXP_FIRST: Final = _number(1.9875691500e-4)
_EXP_NEXT: Final = tuple(
    map(
        _number,
        (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
    )
)
# tanh(x) = x + x z P(z) with z = x^2 on |x| < 0.625: the polynomial of Cephes' tanhf.
_TANH: Final = tuple(
    map(
        _number,
        (
            -5.70498872745e-3,
            2.06390887954e-2,
            -5.37397155531e-2,
            1.33314422036e-1,
            -3.33332819422e-1,
        ),
    )
)
# erf(x) = x T(x^2) on |x| < 1, erfc(x) = exp(-x^2) / x P(1/x^2) below 2, R(1/x^2) above: Cephes.
_ERF_SMALL: Final = tuple(
    map(
        _number,
        (
            7.853861353153693e-5,
            -8.010193625184903e-4,
            5.188327685732524e-3,
            -2.685381193529856e-2,
            1.128358514861418e-1,
            -3.761262582423300e-1,
            1.128379165726710,
        ),
    )
)
_ERFC_MIDDLE: Final = tuple(
    map(
        _number,
        (
            2.326819970068386e-2,
            -1.387039388740657e-1,
            3.687424674597105e-1,
            -5.824733027278666e-1,
            6.210004621745983e-1,
            -4.944515323274145e-1,
            3.404879937665872e-1,
            -2.741127028184656e-1,
            5.638259427386472e-1,
        ),
    )
)
_ERFC_LARGE: Final = tuple(
    map(
        _number,
        (
            -1.047766399936249e1,
            1.297719955372516e1,
            -7.495518717768503,
            2.921019019210786,
            -1.015265279202700,
            4.218463358204948e-1,
            -2.820767439740514e-1,
            5.641895067754075e-1,
        ),
    )
)
_ONE: Final = _number(1.0)
_TWO: Final = _number(2.0)
_BLOCK: Final = 1 << 15
"""Elements per pass: temporaries stay in cache, and torch starts no threads for so little."""
_LN2: Final = 0.6931471805599453
_SQRT2: Final = 1.4142135623730951


def exp(x: Tensor) -> Tensor:
    """e**x for float32 of any shape, within 2 units in the last place.

    Results below 2**-125.5 (x < -86.98) are exactly 0, above the float32 range `inf`; NaN stays.
    """
    return exp_(x.clone(memory_format=torch.contiguous_format))


def exp_(x: Tensor) -> Tensor:
    """`exp` in place, for a contiguous tensor."""
    for part in x.view(-1).split(_BLOCK):
        _exp_block(part)
    return x


def _exp_block(x: Tensor) -> None:
    """2**n * exp(r) with x = n ln 2 + r. The limits make 2**(n-1) reach exactly 0 and overflow."""
    r = x.clamp_(-87.3, 88.8)
    shifted = (r * _LOG2E).add_(_ROUND)
    n = shifted - _ROUND
    r.sub_(n * _LN2_HIGH).sub_(n.mul_(_LN2_LOW))
    y = torch.mul(r, _EXP_FIRST, out=n)
    for coefficient in _EXP_NEXT:
        y.add_(coefficient).mul_(r)
    y.mul_(r).add_(r).add_(_ONE)
    # n reaches 128, so the power is built as 2 * 2**(n-1); the bits of 2**-127 are those of 0.
    scale = shifted.view(torch.int32).bitwise_left_shift_(_EXPONENT_BITS).view(torch.float32)
    torch.mul(y.mul_(_TWO), scale, out=x)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent of float32 of any shape, within 2 units in the last place; odd, bit for
    bit."""
    size = x.abs()
    square = size * size
    small = _polynomial(_TANH, square).mul_(square).mul_(size).add_(size)
    large = exp(size * 2.0).add_(1.0).reciprocal_().mul_(-2.0).add_(1.0)
    return torch.where(size < 0.625, small, large).copysign_(x)


def erf(x: Tensor) -> Tensor:
    """Error function of float32 of any shape, within 4 units in the last place; odd, bit for
    bit."""
    size = x.abs()
    square = size * size
    small = _polynomial(_ERF_SMALL, square).mul_(size)
    inverse = size.clamp(min=1.0).reciprocal_()
    tail = inverse * inverse
    rest = torch.where(size < 2.0, _polynomial(_ERFC_MIDDLE, tail), _polynomial(_ERFC_LARGE, tail))
    large = exp(-square).mul_(inverse).mul_(rest).neg_().add_(1.0)
    return torch.where(size < 1.0, small, large).copysign_(x)


def _polynomial(coefficients: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """Horner's rule, the highest power first."""
    y = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        y.add_(coefficient).mul_(x)
    return y.add_(coefficients[-1])


def log(x: Tensor) -> Tensor:
    """Natural logarithm of float32 of any shape, correctly rounded but for rare ties.

    0 gives `-inf`, negative values and NaN give NaN, `inf` stays. Computed in float64.
    """
    wide = x.to(torch.float64)
    result = log_wide(wide)
    result.masked_fill_(wide == 0, -torch.inf).masked_fill_(wide == torch.inf, torch.inf)
    return result.masked_fill_((wide < 0) | wide.isnan(), torch.nan).to(torch.float32)


def log_wide(x: Tensor) -> Tensor:
    """Natural logarithm of float64 of any shape: positive normal numbers, within 3 units in the
    last place.

    Computed as e ln 2 + 2 artanh((m - 1) / (m + 1)) with x = m 2**e; near 1, e is 0.
    """
    bits = x.view(torch.int64)
    exponent = bits.bitwise_right_shift(52).sub_(1023)
    mantissa = bits.bitwise_and((1 << 52) - 1).bitwise_or_(1023 << 52).view(torch.float64)
    large = mantissa > _SQRT2
    mantissa = torch.where(large, mantissa * 0.5, mantissa)
    exponent = (exponent + large).to(torch.float64)
    f = (mantissa - 1.0) / (mantissa + 1.0)
    square = f * f
    series = torch.full_like(f, 1.0 / 19.0)
    for odd in range(17, 0, -2):
        series.mul_(square).add_(1.0 / odd)
    return exponent.mul_(_LN2).add_(series.mul_(f).mul_(2.0))


def tree_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Sum over `dim` as a binary tree anchored at index 0; the dimension disappears.

    Level by level, element i takes element i + h, where h is the largest power of two below the
    length. Appending zeros therefore changes no bit of the result.
    """
    length = x.shape[dim]
    if length == 1:
        return x.select(dim, 0)
    half = 1 << ((length - 1).bit_length() - 1)
    y = x.narrow(dim, 0, half).clone(memory_format=torch.contiguous_format)
    y.narrow(dim, 0, length - half).add_(x.narrow(dim, half, length - half))
    while y.shape[dim] > 1:
        y, upper = y.chunk(2, dim)
        y.add_(upper)
    return y.select(dim, 0)


def sum_neighbours(parts: Sequence[Tensor]) -> Tensor:
    """Sum of 1, 2, 4, ... tensors of one shape: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).

    Neighbours are added first, so a run of 2**n parts that starts at a multiple of 2**n is a
    branch of its own. The parts may be overwritten.
    """
    while len(parts) > 1:
        parts = [left.add_(right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def log_softmax(logits: Tensor, keep: str | None = None) -> Tensor:
    """Row-wise log-probabilities of float32 `[R, V]`; a row depends on itself alone.

    With `keep` they may live in memory of this name until the next call with it.

    Entries of `-inf` keep probability 0. A row without any finite entry becomes NaN.
    """
    del keep
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows = max(1, (1 << 20) // max(1, logits.shape[-1]))
    for part, result in zip(logits.split(rows), out.split(rows), strict=True):
        torch.sub(part, part.amax(-1, keepdim=True), out=result)
        result.sub_(log(tree_sum(exp(result))).unsqueeze(-1))
    return out
