"""Codes of a weight for a checkpoint: to the nearest, or with each column's rounding error carried
to the columns after it (GPTQ).

Scales are rounded to the type that the checkpoint keeps them in before codes are made, so that
codes are right for what is read back. GPTQ is after Frantar et al. 2022 (arXiv 2210.17323): with
H = sum of x x^T over the inputs, damped, and U the upper Cholesky factor of H^-1, the error of
column k over U[k, k] is taken from the later columns in the ratio of U[k, j]. Knows no layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from quire.kernels.coded import CodedWeight

DAMPING: Final = 0.01
"""Of the mean of H's diagonal, added to it."""
_SPAN: Final = 128
"""Columns whose errors are carried among each other one by one."""
_SHRINK: Final = tuple(1.0 - 0.04 * i for i in range(8))
"""Scales of int4 that are tried, as parts of the one at which nothing is cut off."""
_LEAST: Final = 1e-30


@dataclass(frozen=True, slots=True)
class Codes:
    """A symmetric quantised weight: code * scale."""

    bits: int
    codes: Tensor
    """int8 `[N, K]`: -127 to 127, or -8 to 7."""
    scales: Tensor
    """`[N, G]`, in the checkpoint's type."""
    group: int

    @property
    def nbytes(self) -> int:
        """In a checkpoint."""
        return self.codes.numel() * self.bits // 8 + self.scales.nbytes

    def coded(self, activations: str) -> CodedWeight:
        """As kernels take it: what a reader of the checkpoint gets."""
        scales = self.scales.to(torch.float32)
        if self.bits == 8:
            return CodedWeight("int8", self.codes, scales, None, self.group, activations)
        zeros = torch.full((1, 1), 8, dtype=torch.uint8).expand(scales.shape)
        codes = (self.codes + 8).to(torch.uint8)
        return CodedWeight("int4", codes, scales, zeros, self.group, activations)


def int8_codes(weight: Tensor, dtype: torch.dtype) -> Codes:
    """One scale for each row: max |w| / 127, in `dtype`; ties to even."""
    wide = weight.to(torch.float32)
    scales = _stored(wide.abs().amax(1, keepdim=True) / 127.0, dtype)
    codes = _rounded(wide, scales.to(torch.float32), 8)
    return Codes(8, codes.to(torch.int8), scales, weight.shape[1])


def int4_codes(
    weight: Tensor, group: int, dtype: torch.dtype, hessian: Tensor | None = None
) -> Codes:
    """A scale for each group of columns, with the least squared error of those tried.

    Args:
        weight: `[N, K]`, K a multiple of `group`.
        group: Columns of a scale.
        dtype: In which scales are stored.
        hessian: float64 or float32 `[K, K]`: sum of x x^T of the layer's inputs. With it errors
            are carried on (GPTQ) and weighed by its diagonal.
    """
    if hessian is not None:
        return _carried(weight, group, dtype, hessian)
    wide = weight.to(torch.float32)
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), weight.shape[1] // group, dtype=dtype)
    for g in range(scales.shape[1]):
        columns = slice(g * group, (g + 1) * group)
        scales[:, g : g + 1] = found = _best_scales(wide[:, columns], dtype)
        codes[:, columns] = _rounded(wide[:, columns], found.to(torch.float32), 4).to(torch.int8)
    return Codes(4, codes, scales, group)


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """In the checkpoint's type; 1 for zeros."""
    kept = scales.to(dtype)
    return kept.masked_fill(kept.to(torch.float32).abs() < _LEAST, 1.0)


def _rounded(wide: Tensor, scales: Tensor, bits: int) -> Tensor:
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    return (wide / scales).round_().clamp_(low, high)


def _best_scales(group: Tensor, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
    """Of `[N, group]`: `[N, 1]`. The number of the largest size gets the code -8, whatever its
    sign, so that it has a code of its own; or a smaller scale cuts it off."""
    largest = group.gather(1, group.abs().argmax(1, keepdim=True)) / -8.0
    best = _stored(largest, dtype)
    least = torch.full_like(largest, torch.inf)
    for part in _SHRINK:
        scales = _stored(largest * part, dtype)
        wide = scales.to(torch.float32)
        error = (_rounded(group, wide, 4) * wide - group).square_()
        error = (error if weights is None else error * weights).sum(1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, scales, best)
    return best


def _carried(weight: Tensor, group: int, dtype: torch.dtype, hessian: Tensor) -> Codes:
    rest = weight.to(torch.float32, copy=True)
    n, k = rest.shape
    upper, importance = _factor(hessian)
    codes = torch.empty(n, k, dtype=torch.int8)
    scales = torch.empty(n, k // group, dtype=dtype)
    span = max(group, _SPAN // group * group)
    for first in range(0, k, span):
        last = min(first + span, k)
        errors = torch.empty(n, last - first)
        for column in range(first, last):
            if column % group == 0:
                own = slice(column, column + group)
                found = _best_scales(rest[:, own], dtype, importance[own])
                scales[:, column // group] = found.squeeze(1)
                scale = found.to(torch.float32)
            given = _rounded(rest[:, column : column + 1], scale, 4)
            codes[:, column] = given.squeeze(1).to(torch.int8)
            error = (rest[:, column : column + 1] - given * scale) / upper[column, column]
            rest[:, column:last] -= error * upper[column, column:last]
            errors[:, column - first] = error.squeeze(1)
        rest[:, last:] -= errors @ upper[first:last, last:]
    return Codes(4, codes, scales, group)


def _factor(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """The upper factor of the damped inverse, and the diagonal of H; both float32.

    Inputs that were always zero get the mean of the diagonal: their weights are rounded to the
    nearest.
    """
    wide = hessian.to(torch.float64, copy=True)
    diagonal = wide.diagonal()
    mean = float(diagonal.mean()) or 1.0
    diagonal[diagonal == 0] = mean
    importance = diagonal.to(torch.float32)
    damping = DAMPING
    while True:
        damped = wide.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(failed):
                return upper.to(torch.float32), importance
        damping *= 10
