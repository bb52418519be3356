"""Products with layers that are no single prepared weight: parts of different kinds side by side,
and weights with minima. Knows no checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.coded import CodedWeight
from quire.kernels.dispatch import Ops
from quire.kernels.exact import tree_sum
from quire.quantization.scheme import WithMinima

Piece = CodedWeight | WithMinima | Tensor
"""The weight of one of the layers that are stacked; a tensor is one that is not quantised."""


@dataclass(frozen=True, slots=True)
class PartialProduct:
    """Some of a layer's outputs: a prepared weight, and perhaps what is taken from each.

    x @ (code * scale - minimum).T = x @ (code * scale).T - sums(x) @ minima.T, where sums(x) are
    those of each group of columns, as a tree (`exact.tree_sum`).
    """

    prepared: Any
    minima: Any = None
    """Prepared as a weight `[N, G]`; `None`: there are none."""
    group: int = 0
    """Columns of a group of minima."""

    def apply(self, x: Tensor, out_dtype: torch.dtype | None, ops: Ops) -> Tensor:
        """`[T, K] -> [T, N]`, rounded once."""
        if self.minima is None:
            return ops.linear(x, self.prepared, out_dtype)
        sums = tree_sum(x.to(torch.float32).unflatten(1, (-1, self.group)))
        wide = ops.linear(x, self.prepared, torch.float32)
        wide = wide - ops.linear(sums.contiguous(), self.minima, torch.float32)
        return wide.to(out_dtype or x.dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype, ops: Ops) -> Tensor:
        """Rows of the weight `[T, K]`."""
        if self.minima is None:
            return ops.embedding_of(ids, self.prepared, dtype)
        wide = ops.embedding_of(ids, self.prepared, torch.float32)
        minima = ops.embedding_of(ids, self.minima, torch.float32)
        return (wide - minima.repeat_interleave(self.group, 1)).to(dtype)

    @property
    def nbytes(self) -> int:
        """Of both."""
        minima = 0 if self.minima is None else int(self.minima.nbytes)
        return int(self.prepared.nbytes) + minima

    def kept(self, ops: Ops) -> dict[str, Any]:
        """As tensors and plain values, for another process."""
        assert ops.keep_linear is not None
        minima = None if self.minima is None else ops.keep_linear(self.minima)
        return {"prepared": ops.keep_linear(self.prepared), "minima": minima, "group": self.group}

    @classmethod
    def restored(cls, kept: dict[str, Any], ops: Ops) -> PartialProduct:
        """The inverse of `kept`."""
        assert ops.restore_linear is not None, "whoever keeps it restores it"
        minima = None if kept["minima"] is None else ops.restore_linear(kept["minima"])
        return cls(ops.restore_linear(kept["prepared"]), minima, kept["group"])


def dense(piece: Piece) -> Tensor:
    """The weight, in a float type."""
    return piece if isinstance(piece, Tensor) else piece.dequantise()


def takes_floats(piece: Piece) -> bool:
    """Whether its activations stay as they are."""
    if isinstance(piece, WithMinima):
        piece = piece.coded
    return isinstance(piece, Tensor) or piece.activations == "float"


def alike(pieces: list[Piece]) -> bool:
    """Whether one prepared weight can have all: quantised in the same way."""
    if all(isinstance(piece, WithMinima) for piece in pieces):
        halves = [piece for piece in pieces if isinstance(piece, WithMinima)]
        same = len({half.group for half in halves}) == 1
        return same and alike([half.coded for half in halves])
    coded = [piece for piece in pieces if isinstance(piece, CodedWeight)]
    if len(coded) < len(pieces):
        return False
    first, smallest = coded[0], min(piece.group for piece in coded)
    return (
        all((p.kind, p.activations) == (first.kind, first.activations) for p in coded)
        and all(piece.group % smallest == 0 for piece in coded)
        and all(_same_order(piece, first) for piece in coded)
    )


def _same_order(one: CodedWeight, other: CodedWeight) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)
