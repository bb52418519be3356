"""Packed weights in tiles of 64 columns: what all of them have. Layout: `csrc/gemm.h`.

Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from quire.kernels.pages import weight_memory

ELEMENT_CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types as csrc/isa.h numbers them."""
NARROW_CODES: Final = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 4, torch.int8: 5, torch.uint8: 6}
"""The same of weights that become numbers before they are multiplied, by the type of their codes;
uint8: four bits and a table."""
E8M0: Final = 7
"""Of scales: powers of two."""
CODES8: Final = 8
CODES4: Final = 9
"""Of weights that are multiplied as codes."""
_SMALL: Final = 256 << 10
"""Bytes below which a weight gets no part of a large page."""
_TILE: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A packed weight `[N, K]` with its bias."""

    handle: Any
    """The compiled module's view of the layer."""
    memory: Tensor
    """The packed weight, bytes."""
    bias: Tensor | None
    """float32, filled up to whole tiles."""
    out_features: int
    """N."""
    in_features: int
    dtype: torch.dtype
    """Of the packed weight."""
    gated: bool
    leaves: int
    """Equal parts of K that are summed on their own."""

    @property
    def nbytes(self) -> int:
        """Of the weight."""
        return self.memory.nbytes

    @property
    def layout(self) -> object:
        """The same object for layers of equal sizes whose rows one kernel can prepare together."""
        return self.dtype


def allocate(size: int) -> Tensor:
    """Memory for a packed weight, undefined bytes."""
    if size < _SMALL and not weight_memory.is_kept:
        return torch.empty(size, dtype=torch.uint8)
    return weight_memory.take(size)


def tiled_columns(n: int, gated: bool) -> Tensor:
    """The row of the weight that stands in each packed column: int64, whole tiles; -1 where a
    column only fills up a tile. Half of a tile of a gated layer are gates, the others their ups."""
    parts, width = (2, _TILE // 2) if gated else (1, _TILE)
    rows = n // parts
    tiles = -(-rows // width)
    index = torch.arange(tiles * width).view(tiles, 1, width)
    shift = torch.arange(parts).view(1, parts, 1) * rows
    return torch.where(index < rows, index + shift, -1).view(-1)


def tiled_bias(bias: Tensor, gated: bool) -> Tensor:
    """Float32 in the order of the packed columns, zeros in those that fill up a tile."""
    columns = tiled_columns(len(bias), gated)
    wide = bias.to(torch.float32)
    return torch.where(columns < 0, 0.0, wide[columns.clamp(min=0)])
