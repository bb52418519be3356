"""Plain operations on rows of logits. Knows no requests."""

from __future__ import annotations

import numpy as np
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


def keep_allowed(logits: Tensor, which: np.ndarray, masks: np.ndarray) -> Tensor:
    """Put -inf in place of what masks do not allow, in some rows of `[rows, vocab]`.

    Args:
        logits: Float; overwritten. No NaN.
        which: int64 `[n]`, the rows that have masks, each once.
        masks: int32 or uint32 `[n, ceil(vocab / 32)]`: bit `i % 32` of word `i // 32` allows
            column `i`.

    Returns:
        `[n]`: the largest number left of each of these rows; -inf if none is.

    Raises:
        ValueError: the masks are made for another vocabulary.
    """
    check_masks(logits, which, masks)
    rows = torch.from_numpy(which).to(logits.device)
    words = torch.from_numpy(masks.view(np.int32)).to(logits.device)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = (words.unsqueeze(2) >> places & 1).view(len(which), -1)[:, : logits.shape[1]]
    kept = logits[rows].masked_fill_(bits == 0, -torch.inf)
    logits[rows] = kept
    return kept.amax(1)


def check_masks(logits: Tensor, which: np.ndarray, masks: np.ndarray) -> None:
    """Raises ValueError: the masks are not for these rows of logits."""
    wanted = (len(which), -(-logits.shape[1] // 32))
    if masks.shape != wanted or masks.itemsize != 4 or not masks.flags.c_contiguous:
        raise ValueError(
            f"masks over {logits.shape[1]} tokens are {wanted} words of 32 bits, got "
            f"{masks.shape} of {masks.dtype}"
        )
