"""Ways to quantise that several formats of checkpoints share: the tensors' names differ, not what
they mean. Each is a `Scheme`. Knows no configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from quire.kernels.coded import CodedWeight
from quire.quantization.bits import nibbles
from quire.quantization.scheme import (
    FLOATS,
    LayerData,
    Wanted,
    blocks_to_rows,
    ceil_div,
    per_row,
)

E4M3: Final = frozenset({"F8_E4M3"})
EXPONENTS: Final = frozenset({"U8", "F8_E8M0"})
_BYTES: Final = frozenset({"U8"})
_ZERO: Final = "weight_zero_point"


@dataclass(frozen=True, slots=True)
class Fp8:
    """`weight` e4m3 and scales of the tensor, its rows, or blocks: weight = code * scale."""

    scale: str = "weight_scale"
    """Name of the scales. Also `weight_scale_inv` is what codes are multiplied with."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; `None`: rows or the whole tensor do."""
    exponents: bool = False
    """Scales are powers of two, stored as exponents (MXFP8)."""
    stacked: int = 1
    """Layers of as many rows each that `weight` has: each may have scales of its own."""
    activations: str = field(default="float", init=False)

    @property
    def label(self) -> str:
        """See `Scheme`."""
        if self.block is None:
            return "fp8 (e4m3)"
        rows, columns = self.block
        kind = "mxfp8" if self.exponents else "fp8 (e4m3)"
        if rows == 1:
            return f"{kind} in groups of {columns}"
        return f"{kind} in blocks of {rows} x {columns}"

    def tensors(self, rows: int, columns: int) -> Mapping[str, Wanted]:
        """See `Scheme`."""
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (rows,), (rows, 1))
        if self.stacked > 1:
            shapes = (*shapes, (self.stacked,), (self.stacked, 1))
        if self.block is not None:
            groups = ceil_div(columns, self.block[1])
            shapes = tuple((n, groups) for n in self.block_rows(rows))
        types = EXPONENTS if self.exponents else FLOATS | (EXPONENTS if self.block else set())
        return {
            "weight": Wanted(E4M3, ((rows, columns),)),
            self.scale: Wanted(frozenset(types), shapes),
            _ZERO: Wanted(FLOATS | E4M3 | {"I8"}, optional=True),
        }

    def decode(self, layer: LayerData) -> CodedWeight:
        """See `Scheme`. Some writers have zero points beside floats, which have none."""
        if _ZERO in layer and bool((layer[_ZERO].to(torch.float32) != 0).any()):
            raise layer.refuse(_ZERO, "must be 0 for weights of floats")
        scales, group = layer.floats(self.scale), layer.columns
        if self.block is not None:
            scales = self._scales_of_rows(layer, scales, self.block[0])
            group = min(self.block[1], layer.columns)
        elif scales.numel() == self.stacked:
            each = per_row(scales, self.stacked)
            scales = blocks_to_rows(each, layer.rows, layer.rows // self.stacked)
        else:
            scales = per_row(scales, layer.rows)
        return CodedWeight("e4m3", layer.e4m3("weight"), scales, None, group, "float")

    def block_rows(self, rows: int) -> tuple[int, int]:
        """Rows of scales of blocks: if blocks go on from one layer to the next that is stacked,
        and if they begin anew in each."""
        assert self.block is not None
        height = self.block[0]
        return ceil_div(rows, height), self.stacked * ceil_div(rows // self.stacked, height)

    def _scales_of_rows(self, layer: LayerData, scales: Tensor, height: int) -> Tensor:
        """Of blocks of `height` rows."""
        going_on, _ = self.block_rows(layer.rows)
        if len(scales) == going_on:
            return blocks_to_rows(scales, layer.rows, height)
        each = layer.rows // self.stacked
        parts = scales.chunk(self.stacked)
        return torch.cat([blocks_to_rows(part, each, height) for part in parts])

    def is_unclear(self, rows: int) -> bool:
        """Whether the number of scales leaves open which of both `block_rows` means."""
        if self.block is None or self.stacked == 1:
            return False
        going_on, anew = self.block_rows(rows)
        return going_on == anew and rows // self.stacked % self.block[0] > 0


@dataclass(frozen=True, slots=True)
class Fp4:
    """Two e2m1 codes in a byte, the lower half first, and scales of groups of columns.

    The scales are powers of two (MXFP4), or e4m3 and one float for the whole tensor (NVFP4). OCP
    Microscaling Formats 1.0; NVFP4 as in compressed-tensors and ModelOpt, whose scales of the
    tensor are each other's reciprocals.
    """

    packed: str
    """Name of the codes."""
    scale: str = "weight_scale"
    group: int = 32
    whole: str | None = None
    """Name of the scale of the tensor; `None`: MXFP4."""
    divides: bool = False
    """The scale of the tensor divides the others."""
    blocks: bool = False
    """Codes are stored `[N, G, bytes]` (gpt-oss)."""
    activations: str = field(default="float", init=False)

    @property
    def label(self) -> str:
        """See `Scheme`."""
        return "mxfp4" if self.whole is None else "nvfp4"

    def tensors(self, rows: int, columns: int) -> Mapping[str, Wanted]:
        """See `Scheme`."""
        groups = ceil_div(columns, self.group)
        shape = (rows, groups, self.group // 2) if self.blocks else (rows, columns // 2)
        of_groups = EXPONENTS if self.whole is None else E4M3
        found = {
            self.packed: Wanted(_BYTES, (shape,)),
            self.scale: Wanted(of_groups, ((rows, groups),)),
        }
        if self.whole is not None:
            found[self.whole] = Wanted(FLOATS, ((), (1,), (1, 1), (rows, 1)))
        return found

    def decode(self, layer: LayerData) -> CodedWeight:
        """See `Scheme`."""
        codes = nibbles(layer[self.packed].flatten(1))
        scales = layer.floats(self.scale)
        if self.whole is not None:
            of_tensor = layer.floats(self.whole).reshape(-1, 1)
            if self.divides and not bool((of_tensor != 0).all()):
                raise layer.refuse(self.whole, "must not be 0: other scales are divided by it")
            scales = scales / of_tensor if self.divides else scales * of_tensor
        return CodedWeight("e2m1", codes, scales, None, self.group, "float")


@dataclass(frozen=True, slots=True)
class Int8:
    """`weight` int8 and scales of the tensor, its rows, or groups: (code - zero) * scale."""

    activations: str
    group: int | None = None
    """`None`: rows or the whole tensor have one scale."""
    symmetric: bool = True
    scale: str = "weight_scale"
    zero: str = _ZERO

    @property
    def label(self) -> str:
        """See `Scheme`."""
        return "int8" if self.group is None else f"int8 in groups of {self.group}"

    def tensors(self, rows: int, columns: int) -> Mapping[str, Wanted]:
        """See `Scheme`."""
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (rows,), (rows, 1))
        if self.group is not None:
            shapes = ((rows, ceil_div(columns, self.group)),)
        return {
            "weight": Wanted(frozenset({"I8"}), ((rows, columns),)),
            self.scale: Wanted(FLOATS, shapes),
            self.zero: Wanted(frozenset({"I8", "I32"}), shapes, optional=self.symmetric),
        }

    def decode(self, layer: LayerData) -> CodedWeight:
        """See `Scheme`."""
        scales = layer.floats(self.scale)
        zeros = layer[self.zero].to(torch.int32) if self.zero in layer else None
        if zeros is not None and bool(((zeros < -128) | (zeros > 127)).any()):
            raise layer.refuse(self.zero, "holds zero points outside -128 to 127")
        if self.group is None:
            scales = per_row(scales, layer.rows)
            zeros = None if zeros is None else per_row(zeros, layer.rows)
        if zeros is not None and not bool(zeros.any()):
            zeros = None
        group = min(self.group or layer.columns, layer.columns)
        return CodedWeight("int8", layer["weight"], scales, zeros, group, self.activations)


def integer_codes(
    codes: Tensor,
    bits: int,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    activations: str,
    order: Tensor | None = None,
) -> CodedWeight:
    """Unsigned codes of 2 to 8 bits, with unsigned zeros (`None`: the middle of the range).

    Up to 4 bits are kept as such. Wider ones and their zeros are moved down by the middle of the
    range, which leaves code - zero what it is.
    """
    middle = 1 << (bits - 1)
    if bits <= 4:
        if zeros is None:
            zeros = torch.full(scales.shape, middle, dtype=torch.uint8)
        return CodedWeight("int4", codes, scales, zeros, group, activations, order)
    signed = codes.to(torch.int16).sub_(middle).to(torch.int8)
    moved = None if zeros is None else zeros.to(torch.int32) - middle
    if moved is not None and not bool(moved.any()):
        moved = None
    return CodedWeight("int8", signed, scales, moved, group, activations, order)
