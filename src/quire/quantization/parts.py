"""Layers whose parts are quantised in different ways: as one weight where that changes no number,
else side by side. Knows no checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.coded import KINDS, CodedWeight

Piece = CodedWeight | Tensor
"""The weight of one of the layers that are stacked; a tensor is one that is not quantised."""


def dense(piece: Piece) -> Tensor:
    """The weight, in a float type."""
    return piece if isinstance(piece, Tensor) else piece.dequantise()


def takes_floats(piece: Piece) -> bool:
    """Whether its activations stay as they are."""
    return isinstance(piece, Tensor) or piece.activations == "float"


def as_one(pieces: Sequence[Piece]) -> list[CodedWeight] | None:
    """The pieces as parts of one weight, `None` if they cannot be: quantised in the same way, or
    whole multiples of their scales, which 8 bits hold whatever they were."""
    coded = [piece for piece in pieces if isinstance(piece, CodedWeight)]
    if len(coded) < len(pieces) or not _fit_together(coded):
        return None
    if len({piece.kind for piece in coded}) == 1:
        return coded
    if all(KINDS[piece.kind].step and piece.activations == "int8" for piece in coded):
        return [piece.as_int8() for piece in coded]
    return None


def _fit_together(coded: Sequence[CodedWeight]) -> bool:
    first, smallest = coded[0], min(piece.group for piece in coded)
    columns = first.shape[1]
    return (
        len({piece.activations for piece in coded}) == 1
        and all(piece.group % smallest == 0 or piece.group >= columns for piece in coded)
        and all(_same_order(piece, first) for piece in coded)
    )


def _same_order(one: CodedWeight, other: CodedWeight) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)
