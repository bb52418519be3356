"""Packs quantised weights for the compiled products of codes. Layout: `csrc/coded_tile.h`.

Knows no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from quire.kernels.coded import KINDS, CodedWeight
from quire.kernels.coded_linear import settled_leaves
from quire.kernels.compiled import lib
from quire.kernels.packed import (
    CODES4,
    CODES8,
    E8M0,
    ELEMENT_CODES,
    PackedLinear,
    allocate,
    tiled_columns,
)
from quire.kernels.pages import weight_memory
from quire.utils.math import align_up

_UNIT: Final = 16
"""Columns of codes that are always multiplied together."""
TILES: Final = 64
"""Tiles that are packed at a time: what is needed for it stays small beside the layer."""


@dataclass(frozen=True, slots=True)
class Form:
    """How the codes of one layer are packed: plain values."""

    code: int
    n: int
    k: int
    gated: bool
    leaves: int
    group: int
    """0: one group."""
    scale_type: int
    group_zeros: bool
    zero: int
    wide: int = 0
    """Of a weight that becomes numbers: their type."""
    group_minima: bool = False
    short_scales: bool = False
    """Of groups of codes: see `has_short_scales`."""


_forms: Final[dict[Form, Form]] = {}
"""One object for all that are equal."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedCoded(PackedLinear):
    """A packed quantised weight."""

    form: Form
    tensors: dict[str, Tensor | None]
    """What the handle points to besides memory and bias: scales, zeros, order, table, values."""

    @property
    def layout(self) -> object:
        """See `PackedLinear.layout`. With an order of its own, a layer is like no other."""
        return self if self.tensors["order"] is not None else self.form

    @property
    def nbytes(self) -> int:
        """Of codes, scales and zeros."""
        others = sum(t.nbytes for t in self.tensors.values() if t is not None)
        return self.memory.nbytes + others


POINTERS: Final = ("scales", "zeros", "order", "table", "values")
"""Tensors that a handle points to, besides memory and bias."""


def can_pack(coded: CodedWeight) -> bool:
    """Whether there are compiled products for it."""
    k = coded.shape[1]
    return coded.activations == "int8" and (coded.group % _UNIT == 0 or coded.group >= k) and k > 0


def pack_coded(coded: CodedWeight, bias: Tensor | None, gated: bool, leaves: int) -> PackedCoded:
    """Pack it.

    Raises:
        ModelLoadError: a group crosses a leaf.
    """
    (n, k), kind = coded.shape, KINDS[coded.kind]
    leaves = settled_leaves(coded, leaves)
    columns = tiled_columns(n, gated)
    zeros, zero = _zeros_of(coded)
    scales = coded.scales * kind.step
    tensors: dict[str, Tensor | None] = dict.fromkeys(POINTERS)
    if coded.order is not None:
        tensors["order"] = coded.order.to(torch.int32)
    if kind.values:
        whole = [round(value / kind.step) + 128 for value in kind.values]
        tensors["table"] = torch.tensor(whole, dtype=torch.uint8)
    one = coded.group >= k and kind.bits == 8 and coded.minima is None
    scale_type = ELEMENT_CODES[torch.float32] if one else shortest(scales, coded.minima)
    form = Form(
        CODES8 if kind.bits == 8 else CODES4, n, k, gated, leaves,
        0 if one else align_up(min(coded.group, k), _UNIT),
        scale_type, zeros is not None and not one, zero, 0, coded.minima is not None,
        not one and has_short_scales(scales, min(coded.group, k)),
    )  # fmt: skip
    if one:
        tensors["scales"] = placed(scales[:, 0], columns)
        tensors["zeros"] = None if zeros is None else placed(zeros[:, 0].to(torch.int32), columns)

    def tiles(some: Tensor) -> Tensor:
        codes = _codes(coded.codes, some, form)
        return codes if one else with_heads(codes, scales, zeros, coded.minima, some, scale_type)

    return packed(form, bias, tensors, columns, tiles)


def packed(
    form: Form,
    bias: Tensor | None,
    tensors: Mapping[str, Tensor | None],
    columns: Tensor,
    tiles: Callable[[Tensor], Tensor],
) -> PackedCoded:
    """A weight out of what `tiles` gives for some of its columns: their bytes `[tiles, ...]`."""
    kept = {name: None if t is None else weight_memory.copy(t) for name, t in tensors.items()}
    memory = allocate(lib.linear_bytes(_handle(form, 0, None, kept)))
    per_tile = memory.view(len(columns) // 64, -1)
    for first in range(0, len(per_tile), TILES):
        some = columns[64 * first : 64 * (first + TILES)]
        per_tile[first : first + TILES].copy_(tiles(some).reshape(len(some) // 64, -1))
    return _made(form, memory, bias, kept)


def _zeros_of(coded: CodedWeight) -> tuple[Tensor | None, int]:
    """Zeros, or the one that all are."""
    if coded.zeros is None or not coded.zeros.numel():
        return None, 0
    first = int(coded.zeros[0, 0])
    if bool((coded.zeros == first).all()):
        return None, first
    return coded.zeros, 0


def shortest(scales: Tensor, minima: Tensor | None = None) -> int:
    """The shortest type that has these numbers, as csrc/isa.h numbers it."""
    if minima is not None:
        scales = torch.cat((scales, minima))
    bits = scales.contiguous().view(torch.int32)
    if not bool((bits & 0x807FFFFF).any()):
        return E8M0
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).to(torch.float32), scales):
            return ELEMENT_CODES[dtype]
    return ELEMENT_CODES[torch.float32]


_LARGEST_PRODUCT: Final = 255 * 127
"""Of a weight's code less its zero and a row's code."""


def has_short_scales(scales: Tensor, group: int) -> bool:
    """Whether a group's sum n, |n| < 2**22, times its scale may be one step of arithmetic, with
    the bits of two: `fuses` in csrc/coded_tile.h, which says why."""
    in_reach = bool((scales.abs() <= 2.0**100).all())
    long = scales.contiguous().view(torch.int32) & 3
    return group * _LARGEST_PRODUCT < 2**22 and in_reach and not bool(long.any())


_DTYPES: Final = {code: dtype for dtype, code in ELEMENT_CODES.items()}


def _as_type(scales: Tensor, code: int) -> Tensor:
    if code == E8M0:
        return (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return scales.to(_DTYPES[code])


def placed(rows: Tensor, columns: Tensor) -> Tensor:
    """Rows in the order of packed columns, zeros in those that fill up a tile."""
    found = rows.index_select(0, columns.clamp(min=0))  # whole rows, unlike rows[columns]
    if bool((columns < 0).any()):
        found[columns < 0] = 0
    return found


def _codes(codes: Tensor, columns: Tensor, form: Form) -> Tensor:
    """Bytes [tiles, groups, ...]."""
    some = placed(codes, columns)
    if codes.dtype == torch.int8:
        some = some.view(torch.uint8) ^ 0x80
    group = form.group or align_up(form.k, _UNIT)
    if form.k % group:
        some = torch.nn.functional.pad(some, (0, -form.k % group))
    tiles = len(columns) // 64
    if form.code == CODES8:
        four = some.view(torch.int32).view(tiles, 64, -1, group // 4)
        return four.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)
    eight = some.view(torch.int32).view(tiles, 64, -1, group // 8, 2)
    four = eight[..., 0] | eight[..., 1] << 4
    return four.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)


def with_heads(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    minima: Tensor | None,
    columns: Tensor,
    scale_type: int,
) -> Tensor:
    """Each group's scales, zeros and minima before its codes."""
    tiles = len(columns) // 64
    pieces = [_as_type(placed(scales, columns), scale_type)]
    if zeros is not None:
        pieces.append(placed(zeros.to(torch.int8), columns))
    if minima is not None:
        pieces.append(_as_type(placed(minima, columns), scale_type))
    heads = [
        piece.view(tiles, 64, -1).transpose(1, 2).contiguous().view(torch.uint8) for piece in pieces
    ]
    return torch.cat([*heads, codes], 2)


def _handle(
    form: Form, memory: int, bias: Tensor | None, tensors: Mapping[str, Tensor | None]
) -> Any:
    place = {name: 0 if t is None else t.data_ptr() for name, t in tensors.items()}
    return lib.make_coded(
        memory,
        0 if bias is None else bias.data_ptr(),
        form.code,
        form.n,
        form.k,
        form.gated,
        form.leaves,
        place["scales"],
        place["zeros"],
        place["order"],
        form.group,
        form.scale_type,
        form.group_zeros,
        form.zero,
        place["table"],
        form.wide,
        place["values"],
        form.group_minima,
        form.short_scales,
    )


def _made(
    form: Form, memory: Tensor, bias: Tensor | None, tensors: dict[str, Tensor | None]
) -> PackedCoded:
    form = _forms.setdefault(form, form)
    handle = _handle(form, memory.data_ptr(), bias, tensors)
    return PackedCoded(
        handle, memory, bias, form.n, form.k, torch.int8, form.gated, form.leaves, form, tensors
    )


def keep_coded(layer: PackedCoded) -> dict[str, Any]:
    """As tensors and plain values, for another process."""
    form = {name: getattr(layer.form, name) for name in Form.__slots__}
    return {"memory": layer.memory, "bias": layer.bias, "form": form, "tensors": layer.tensors}


def restore_coded(kept: Mapping[str, Any]) -> PackedCoded:
    """The inverse of `keep_coded`. Copies nothing."""
    made = _made(Form(**kept["form"]), kept["memory"], kept["bias"], kept["tensors"])
    assert len(made.memory) == lib.linear_bytes(made.handle), "packed by another version"
    return made
