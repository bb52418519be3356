"""Packs quantised weights that are multiplied with float activations. Layout: `csrc/widen.h`.

The codes become numbers of the model's type in registers or a near cache, so the product has the
bits of that of `CodedWeight.dequantise`, rounded to that type, and its memory is that of the codes.
8-bit floats are multiplied as they are, and sums with their scales
(`coded_linear.PreparedScaled`). Knows no checkpoint.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from quire.kernels.coded import KINDS, CodedWeight
from quire.kernels.coded_linear import can_scale
from quire.kernels.native_coded import (
    POINTERS,
    Form,
    PackedCoded,
    packed,
    placed,
    shortest,
    with_heads,
)
from quire.kernels.packed import ELEMENT_CODES, NARROW_CODES, tiled_columns
from quire.utils.math import align_up

_BF16: Final = ELEMENT_CODES[torch.bfloat16]
_LARGEST: Final = 2.0**100
"""Of scales: codes are divided by powers of two and scales multiplied."""


def can_pack_narrow(coded: CodedWeight, leaves: int) -> bool:
    """Whether there are compiled products for it. Columns in an order of their own would be added
    in that order."""
    k = coded.shape[1]
    whole = can_scale(coded.group, k)
    fits = k > 0 and coded.order is None and (leaves == 1 or k % (2 * leaves) == 0)
    return whole and fits and bool((coded.scales.abs() < _LARGEST).all())


def pack_narrow(
    coded: CodedWeight, bias: Tensor | None, gated: bool, leaves: int, dtype: torch.dtype
) -> PackedCoded:
    """Pack a weight whose numbers are rounded to `dtype`."""
    (n, k), kind = coded.shape, KINDS[coded.kind]
    columns = tiled_columns(n, gated)
    zeros = None if coded.zeros is None or not bool(coded.zeros.any()) else coded.zeros
    tensors: dict[str, Tensor | None] = dict.fromkeys(POINTERS)
    if kind.bits < 8:
        values = torch.tensor(kind.values or range(16), dtype=torch.float32)
        if zeros is not None and bool((zeros == zeros[0, 0]).all()):
            values, zeros = values - float(zeros[0, 0]), None
        tensors["values"] = values + 0.0  # no -0, so that every path has the same zero
    scale_type = shortest(coded.scales, coded.minima)
    form = Form(
        NARROW_CODES[coded.codes.dtype], n, k, gated, leaves,
        align_up(min(coded.group, k), 2), scale_type, zeros is not None, 0,
        ELEMENT_CODES[dtype], coded.minima is not None,
    )  # fmt: skip

    def tiles(some: Tensor) -> Tensor:
        codes = _codes(coded.codes, some, form)
        return with_heads(codes, coded.scales, zeros, coded.minima, some, scale_type)

    return packed(form, bias, tensors, columns, tiles)


def _codes(codes: Tensor, columns: Tensor, form: Form) -> Tensor:
    """Bytes [tiles, groups, ...] in the order of the numbers of type `form.wide`."""
    some = placed(codes.view(torch.uint8), columns)
    if form.k % form.group:
        some = torch.nn.functional.pad(some, (0, -form.k % form.group))
    tiles, groups = len(columns) // 64, some.shape[1] // form.group
    if form.wide == _BF16:  # two columns of codes stay together
        pairs = some.view(torch.int16).view(tiles, 64, groups, -1)
        some = pairs.permute(0, 2, 3, 1).contiguous().view(torch.uint8)
    else:
        some = some.view(tiles, 64, groups, -1).permute(0, 2, 3, 1).contiguous()
    flat = some.view(tiles, groups, -1)
    if form.code != NARROW_CODES[torch.uint8]:
        return flat
    units = flat.view(tiles, groups, -1, 4, 2, 16)
    halves = units[..., 0, :] | units[..., 1, :] << 4
    return halves.transpose(3, 4).reshape(tiles, groups, -1)
