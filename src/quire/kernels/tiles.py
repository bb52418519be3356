"""Linear layers in tiles of a fixed number of rows.

A matrix product's bits depend on the number of rows, because the library picks its algorithm by
it. Here every call has the same shape: 8 rows, filled up with zeros. That leaves the place of a
row within the tile, which is tried out once per weight shape (`rows_interchangeable`); a library
that fails the trial is called row by row instead.

Knows nothing of what the matrices mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from quire.kernels.exact import sum_neighbours
from quire.logger import get_logger
from quire.utils.math import align_up

logger = get_logger(__name__)

TILE_ROWS: Final = 8
"""A lone decode row pays for all of them; a prefill gains little from more."""
_ALIGNMENT: Final = 64
"""Bytes. torch allocates so; a tile's address must not be what changes the bits either."""
_trials: dict[tuple[int, int, str, int], bool] = {}


@dataclass(frozen=True, slots=True, eq=False)
class PreparedLinear:
    """A weight in the layout that `linear` of the same implementation reads."""

    parts: tuple[Tensor, ...]
    """L contiguous float32 `[N, K / L]`: consecutive parts of K, each summed on its own."""
    bias: Tensor | None
    """float32 `[N]`."""
    tiled: bool
    """Whether rows of a tile are interchangeable here; else each row is a call of its own."""

    @property
    def weight(self) -> Tensor:
        """`[N, K]`."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, 1)

    @property
    def leaves(self) -> int:
        """L."""
        return len(self.parts)

    @property
    def out_features(self) -> int:
        """N."""
        return self.parts[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Of the weight."""
        return sum(part.nbytes for part in self.parts)

    def products(self, x: Tensor) -> list[Tensor]:
        """Float32 `[T, N]` for each leaf."""
        multiply = _by_tiles if self.tiled else _by_rows
        pieces = x.chunk(self.leaves, 1)
        return [multiply(piece, part) for piece, part in zip(pieces, self.parts, strict=True)]


class Multiplier(Protocol):
    """A prepared weight, as the plain operations see it."""

    @property
    def weight(self) -> Tensor:
        """`[N, K]`."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """Float32 `[N]`."""
        ...

    def products(self, x: Tensor) -> list[Tensor]:
        """Float32 `[T, N]` for each leaf."""
        ...


def prepare_linear(
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
    leaves: int = 1,
) -> PreparedLinear:
    """Copy a weight `[N, K]` (and bias `[N]`) of any float type for `linear`.

    Args:
        weight: Of any float type; or parts, stacked in their order.
        bias: The same.
        gated: The first half of the rows are gates of the second, for `gated_linear`.
        dtype: Round both to this type; by default they are taken exactly.
        leaves: Equal parts of K that are summed on their own and then added as
            `exact.sum_neighbours` does: 1, 2, 4 or 8 (`quire.config.leaves`).
    """
    del gated  # this layout is the same
    weight = weight if isinstance(weight, Tensor) else torch.cat(tuple(weight))
    if dtype is not None:
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    assert weight.shape[1] % leaves == 0, "leaves are equally long"
    parts = tuple(_copied(part) for part in weight.chunk(leaves, 1))
    shift = None if bias is None else bias.to(torch.float32, copy=True)
    return PreparedLinear(parts, shift, rows_interchangeable(parts[0]))


def _copied(weight: Tensor) -> Tensor:
    return torch.empty(weight.shape, dtype=torch.float32, device=weight.device).copy_(weight)


def linear(
    x: Tensor, layer: Multiplier, out_dtype: torch.dtype | None = None, keep: str | None = None
) -> Tensor:
    """`x @ weight.T + bias` for `[T, K]`, summed in float32, rounded once.

    The result `[T, N]` has `out_dtype`, by default the type of `x`. With a name `keep`, its
    memory is used again by the next call with that name.
    """
    del keep  # allocating is not what costs time here
    return wide_linear(x, layer).to(out_dtype or x.dtype)


def wide_linear(x: Tensor, layer: Multiplier) -> Tensor:
    """`linear` as float32, not rounded: the leaves' sums as a tree, then the bias."""
    out = sum_neighbours(layer.products(x))
    if layer.bias is not None:
        out.add_(layer.bias)
    return out


def add_leaves(x: Tensor, layer: Multiplier, total: Tensor, rows: Tensor, shares: Tensor) -> None:
    """Add the weighed sums of each leaf to the rows that they belong to, without bias.

    `total` is float32 `[L, R, N]`; its `rows` `[T]` (int64, each at most once) grow by `shares`
    `[T]` (float32) times the sums for `x` `[T, K]`: a product and a sum, each rounded.
    """
    for part, piece in zip(total, layer.products(x), strict=True):
        part.index_add_(0, rows, piece.mul_(shares.unsqueeze(1)))


def _by_tiles(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.shape[0]
    x = _padded(x, align_up(rows, TILE_ROWS))
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    transposed = weight.t()
    for tile, result in zip(x.split(TILE_ROWS), out.split(TILE_ROWS), strict=True):
        torch.mm(tile, transposed, out=result)
    return out[:rows]


def _by_rows(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    for row, result in zip(x, out, strict=True):
        # A fresh tensor each time: rows inside `x` need not be aligned alike.
        result.copy_(torch.mv(weight, row.to(torch.float32, copy=True)))
    return out


def _padded(x: Tensor, rows: int) -> Tensor:
    """`x` as aligned float32 with `rows` rows, the new ones zero; a copy only if needed."""
    ready = x.dtype == torch.float32 and x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0
    if ready and x.shape[0] == rows:
        return x
    out = torch.empty(rows, x.shape[1], dtype=torch.float32, device=x.device)
    out[: x.shape[0]].copy_(x)
    out[x.shape[0] :].zero_()
    return out


def rows_interchangeable(weight: Tensor) -> bool:
    """Whether a row's result is the same at every place in a tile and beside any other rows.

    Tried once per shape, device and number of threads. Logs one line if it is not so.
    """
    key = (*weight.shape, str(weight.device), torch.get_num_threads())
    if key not in _trials:
        _trials[key] = _try_rows(weight)
        if not _trials[key]:
            logger.warning(
                "this machine's matrix product depends on a row's place in a tile "
                "(weights %d x %d): computing row by row, which is slower but exact",
                *weight.shape,
            )
    return _trials[key]


def _try_rows(weight: Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    size = (2, TILE_ROWS, weight.shape[1])
    rows, strangers = torch.randn(size, generator=generator).to(weight.device)
    order = torch.randperm(TILE_ROWS, generator=generator).to(weight.device)
    want = _by_tiles(rows, weight)
    if not torch.equal(_by_tiles(rows[order].contiguous(), weight), want[order]):
        return False
    half = torch.arange(TILE_ROWS, device=weight.device).remainder(2).bool().unsqueeze(1)
    mixed = _by_tiles(torch.where(half, rows, strangers), weight)
    if not torch.equal(mixed[1::2], want[1::2]):
        return False
    alone = _by_tiles(rows[TILE_ROWS - 1 :], weight)
    return torch.equal(alone[0], want[TILE_ROWS - 1])
