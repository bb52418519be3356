"""Linear layers with quantised weights, in plain torch: the definition.

With int8 activations, a row x becomes codes q and one scale (`quantise_rows`); sums of products of
codes are whole numbers, so no order and no instruction set changes them:

    y[n] = sum over groups, ascending, of float32(sum over k of q[k] * (code[n, k] - zero[n, g])) *
           scale[n, g], each product and sum rounded to float32, beginning with 0; then times the
           row's scale. A weight with minima takes float32(sum over k of q[k]) * minimum[n, g] from
           it after each group, the product and the difference rounded.

A layer of one group has one such sum, whatever its leaves. Otherwise each leaf has one, and they
are added as those of `tiles.linear`.

With float activations the weight is what `CodedWeight.dequantise` says, rounded to the model's
type, and the product that of `tiles.linear`. But 8-bit floats are multiplied as they are
(`PreparedScaled`):

    leaf[n] = sum over groups, ascending, of (sum over the group's k in the leaf of
              x[k] * code[n, k]) * scale[n, g], each product with a scale and each sum of groups
              rounded, beginning with 0

Knows no checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.coded import KINDS, CodedWeight, concat
from quire.kernels.tiles import PreparedLinear, prepare_linear

LEAST: Final = 2.0**-100
"""Rows whose largest number is below it count as zeros: its inverse is far from overflowing."""
LONGEST: Final = 66_000
"""Columns of a group, at most: 66,000 * 127 * 255 < 2**31."""
_EXACT: Final = 512
"""Columns whose products of codes float32 adds exactly: 512 * 127 * 255 < 2**24."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCoded:
    """A quantised weight for the plain operations; int8 activations."""

    coded: CodedWeight
    whole: Tensor
    """float32 [N, K]: whole multiples of the kind's step, as whole numbers."""
    scales: Tensor
    """float32 [N, G], for those."""
    bias: Tensor | None
    """float32 [N]."""
    leaves: int
    """Sums that are made on their own: 1 for a layer of one group."""

    @property
    def weight(self) -> Tensor:
        """[N, K], float32."""
        return self.coded.dequantise()

    @property
    def out_features(self) -> int:
        """N."""
        return self.coded.shape[0]

    @property
    def nbytes(self) -> int:
        """Of codes and scales, and of the codes as floats."""
        coded = self.coded
        return coded.codes.nbytes + coded.scales.nbytes + self.whole.nbytes + self.scales.nbytes

    def kept(self) -> dict[str, Any]:
        """As tensors and plain values, for another process."""
        names = ("kind", "codes", "scales", "zeros", "group", "activations", "order", "minima")
        coded = {name: getattr(self.coded, name) for name in names}
        return {"coded": coded, "bias": self.bias, "leaves": self.leaves}

    @classmethod
    def restored(cls, kept: Mapping[str, Any]) -> PreparedCoded:
        """The inverse of `kept`."""
        return _prepared(CodedWeight(**kept["coded"]), kept["bias"], kept["leaves"])

    def products(self, x: Tensor) -> list[Tensor]:
        """Float32 [T, N] for each leaf."""
        codes, row_scales = quantise_rows(x)
        if self.coded.order is not None:
            codes = codes.index_select(1, self.coded.order)
        wide, k = codes.to(torch.float32), x.shape[1]
        size, found = k // self.leaves, []
        for first in range(0, k, size) if k else ():
            total = torch.zeros(len(x), self.out_features, device=x.device)
            for begin in range(first, first + size, self.coded.group):
                end = min(begin + self.coded.group, first + size)
                group = begin // self.coded.group
                total.add_(self._whole_sums(wide, begin, end).mul_(self.scales[:, group]))
                if self.coded.minima is not None:
                    sums = codes[:, begin:end].sum(1, dtype=torch.int32).to(torch.float32)
                    total.sub_(sums.unsqueeze(1) * self.coded.minima[:, group])
            found.append(total.mul_(row_scales.unsqueeze(1)))
        return found

    def _whole_sums(self, codes: Tensor, begin: int, end: int) -> Tensor:
        """Sums of products of codes over some columns, exact, then rounded to float32."""
        total = torch.zeros(len(codes), self.out_features, dtype=torch.int32, device=codes.device)
        for first in range(begin, end, _EXACT):
            last = min(first + _EXACT, end)
            # In any order: all partial sums are whole numbers that float32 holds.
            total.add_((codes[:, first:last] @ self.whole[:, first:last].t()).to(torch.int32))
        return total.to(torch.float32)


def scales_sums(coded: CodedWeight) -> bool:
    """Whether the scales are multiplied with sums of products, not with the codes' numbers."""
    floats = coded.kind in ("e4m3", "e5m2") and coded.activations == "float"
    return floats and coded.order is None and can_scale(coded.group, coded.shape[1])


def can_scale(group: int, k: int) -> bool:
    """Whether compiled products take such groups: two columns are multiplied at a time."""
    return group % 2 == 0 or group >= k


@dataclass(frozen=True, slots=True, eq=False)
class PreparedScaled:
    """8-bit floats for the plain operations; float activations."""

    weight: Tensor
    """[N, K], float32: the numbers, for an embedding."""
    groups: tuple[tuple[tuple[int, int, PreparedLinear, Tensor], ...], ...]
    """For each leaf those that have columns in it: the first of these, the end, codes, and
    scales [N]."""
    bias: Tensor | None
    """float32 [N]."""

    @property
    def leaves(self) -> int:
        """L."""
        return len(self.groups)

    @property
    def out_features(self) -> int:
        """N."""
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Of the numbers, and of the codes as floats."""
        return self.weight.nbytes + sum(g[2].nbytes for leaf in self.groups for g in leaf)

    def products(self, x: Tensor) -> list[Tensor]:
        """Float32 [T, N] for each leaf."""
        found = []
        for leaf in self.groups:
            total = torch.zeros(len(x), self.out_features, device=x.device)
            for first, end, codes, scales in leaf:
                (sums,) = codes.products(x[:, first:end])
                total.add_(sums.mul_(scales))
            found.append(total)
        return found


def _scaled(
    coded: CodedWeight, bias: Tensor | None, leaves: int, dtype: torch.dtype | None
) -> PreparedScaled:
    values, k = coded.values(), coded.shape[1]
    assert k % leaves == 0, "leaves are equally long"
    groups = []
    for begin in range(0, k, k // leaves):
        leaf, first, last = [], begin, begin + k // leaves
        while first < last:
            group = first // coded.group
            end = min((group + 1) * coded.group, last)
            codes = prepare_linear(values[:, first:end])
            leaf.append((first, end, codes, coded.scales[:, group].clone()))
            first = end
        groups.append(tuple(leaf))
    weight = coded.dequantise()
    weight = weight if dtype is None else weight.to(dtype).to(torch.float32)
    shift = None if bias is None else bias.to(torch.float32, copy=True)
    return PreparedScaled(weight, tuple(groups), shift)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [T, K] and scales float32 [T] of the rows of [T, K], symmetric.

    With m = max |x| in float32: code = round(x * (127 / m)), ties to even; scale = m / 127. A row
    with m below 2**-100 has codes and scale 0; one with a number that is not finite has codes 0 and
    scale NaN, so nothing that it gives is taken for a number.
    """
    wide = x.to(torch.float32)
    if not x.shape[1]:
        return x.to(torch.int8), wide.new_zeros(len(x))
    most = wide.abs().amax(1)
    finite = most.isfinite() & wide.isfinite().all(1)
    counts = finite & (most >= LEAST)
    # A tensor: torch takes a number over a tensor for the number times an inverse, rounded twice.
    top = torch.full_like(most, 127.0)
    inverse = torch.where(counts, top / most, 0.0)
    codes = torch.where(counts.unsqueeze(1), wide * inverse.unsqueeze(1), 0.0).round_()
    scales = torch.where(counts, most / top, torch.where(finite, 0.0, torch.nan))
    return codes.to(torch.int8), scales


def prepare_coded(
    parts: CodedWeight | Sequence[CodedWeight],
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    leaves: int = 1,
    dtype: torch.dtype | None = None,
) -> PreparedLinear | PreparedCoded | PreparedScaled:
    """Prepare a quantised weight (and bias [N]) for `linear` and all operations that take what
    `prepare_linear` gives.

    Args:
        parts: The weight, or parts whose rows are stacked.
        bias: Of any float type.
        gated: See `prepare_linear`.
        leaves: See `prepare_linear`. No group may cross from one leaf to the next, except in a
            layer of one group with int8 activations: its sums are whole numbers, so it has none.
        dtype: The bias is rounded to this type, and a weight with float activations.

    Raises:
        ModelLoadError: the parts cannot be one layer, or a group crosses a leaf.
    """
    coded = concat((parts,) if isinstance(parts, CodedWeight) else tuple(parts))
    if bias is not None and dtype is not None:
        bias = bias.to(dtype)
    if scales_sums(coded) and coded.shape[1]:
        return _scaled(coded, bias, leaves, dtype)
    if coded.activations == "float":
        return prepare_linear(coded.dequantise(), bias, gated=gated, dtype=dtype, leaves=leaves)
    shift = None if bias is None else bias.to(torch.float32, copy=True)
    return _prepared(coded, shift, settled_leaves(coded, leaves))


def _prepared(coded: CodedWeight, bias: Tensor | None, leaves: int) -> PreparedCoded:
    step = KINDS[coded.kind].step
    # Powers of two: both are exact.
    return PreparedCoded(coded, coded.values().div_(step), coded.scales * step, bias, leaves)


def settled_leaves(coded: CodedWeight, leaves: int) -> int:
    """How many sums a layer with int8 activations is made of.

    Raises:
        ModelLoadError: a group crosses a leaf, or is too long.
    """
    k = coded.shape[1]
    if min(coded.group, k) > LONGEST:
        raise ModelLoadError(
            f"a group may have at most {LONGEST:,} columns, whose products of codes 32 bits hold, "
            f"got {min(coded.group, k):,}"
        )
    if coded.group >= k:
        return 1
    if k % leaves or (leaves > 1 and k // leaves % coded.group):
        raise ModelLoadError(
            f"groups of {coded.group} columns cross from one of the {leaves} parts of "
            f"{k // leaves} columns, in which the layer is summed, to the next"
        )
    return leaves
