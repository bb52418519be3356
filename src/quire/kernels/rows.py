"""Plain operations on rows of logits. Knows no requests."""

from __future__ import annotations

import torch
from torch import Tensor


def finite_rows(logits: Tensor) -> Tensor:
    """Whether all of a row of `[rows, vocab]` is finite: bool `[rows]`."""
    # NaN and infinity both reach the extremes of a row.
    return torch.isfinite(logits.amin(1)) & torch.isfinite(logits.amax(1))


def largest_columns(logits: Tensor) -> Tensor:
    """Column of the largest number of each row, the lowest one among equals: int64 `[rows]`.

    -1 where some number of the row is not finite.
    """
    return logits.argmax(1).masked_fill_(~finite_rows(logits), -1)
