"""Compiled sampling and log-probabilities; plain twins: the steps of `quire.sampling`, and
`exact.py`. Their bits are the same (why that is possible: `csrc/sampling.h`).

Knows numbers per row, no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from quire.kernels import exact
from quire.kernels import rows as plain
from quire.kernels.compiled import lib
from quire.kernels.workspace import workspace


def pick_tokens(
    logits: Tensor,
    numbers: np.ndarray | None,
    seeds: np.ndarray,
    positions: np.ndarray,
    masks: tuple[np.ndarray, np.ndarray] | None = None,
    witnesses: np.ndarray | None = None,
) -> Tensor:
    """One token for each row of `logits`, float32 `[rows, vocab]`, which stay as they are.

    Args:
        logits: No NaN; some finite number in each row.
        numbers: Float64 `[rows, 4]`: temperature (0: the likeliest token), top_k (0: off), top_p
            (1: off), natural logarithm of min_p (-inf: off). `None`: the likeliest everywhere.
        seeds: uint64 `[rows]`.
        positions: int64 `[rows]`, number of output tokens so far.
        masks: Rows and what they allow, as `keep_allowed` takes them. The tokens are those after
            it.
        witnesses: int32 `[rows, n]`, to be filled: tokens that decided. With any mask that allows
            all of them the pick is the same. -1 stands behind them, and alone where so few cannot
            say it.

    Returns:
        int64 `[rows]`; -1: the row's mask leaves no token.

    Raises:
        ValueError: the masks are made for another vocabulary.
    """
    logits = _rows_of_numbers(logits)
    words = np.zeros(len(logits), dtype=np.uintp)
    if masks is not None:
        which, rows = masks
        plain.check_masks(logits, which, rows)
        words[which] = rows.ctypes.data + np.arange(len(rows)) * rows.strides[0]
    tokens = torch.empty(len(logits), dtype=torch.int64)
    lib.pick_tokens(
        logits.data_ptr(),
        *logits.shape,
        logits.stride(0),
        0 if numbers is None else numbers.ctypes.data,
        seeds.ctypes.data,
        positions.ctypes.data,
        0 if masks is None else words.ctypes.data,
        tokens.data_ptr(),
        0 if witnesses is None else witnesses.ctypes.data,
        0 if witnesses is None else witnesses.shape[1],
    )
    return tokens


def keep_allowed(logits: Tensor, which: np.ndarray, masks: np.ndarray) -> Tensor:
    """See `rows.keep_allowed`."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not hasattr(lib, "keep_allowed"):
        # A module that was compiled before this operation existed lacks it.
        return plain.keep_allowed(logits, which, masks)
    plain.check_masks(logits, which, masks)
    best = torch.empty(len(which), dtype=torch.float32)
    lib.keep_allowed(
        logits.data_ptr(),
        logits.shape[1],
        logits.stride(0),
        which.ctypes.data,
        len(which),
        masks.ctypes.data,
        best.data_ptr(),
    )
    return best


def finite_rows(logits: Tensor) -> Tensor:
    """See `rows.finite_rows`."""
    if logits.dtype != torch.float32:
        logits = logits.float()
    logits = _rows_of_numbers(logits)
    answers = torch.empty(len(logits), dtype=torch.bool)
    lib.finite_rows(logits.data_ptr(), *logits.shape, logits.stride(0), answers.data_ptr())
    return answers


def log_softmax(logits: Tensor, keep: str | None = None) -> Tensor:
    """See `exact.log_softmax`; the same bits. For 64 rows of a large vocabulary, pages of fresh
    memory take twice as long as the numbers: that is what `keep` is for."""
    if logits.dim() != 2 or not logits.numel():
        return exact.log_softmax(logits)
    logits = _rows_of_numbers(logits)
    shape = logits.shape[0], logits.shape[1]
    if keep is None:
        out = torch.empty(shape, dtype=torch.float32)
    else:
        out = workspace.take(keep, shape, torch.float32, logits.device)
    lib.log_softmax(logits.data_ptr(), *logits.shape, logits.stride(0), out.data_ptr())
    return out


def top_logprobs(
    logprobs: Tensor, token_ids: Tensor, counts: Sequence[int]
) -> tuple[list[list[int]], list[list[float]], list[int]]:
    """The likeliest tokens of each row, and the rank of one.

    Args:
        logprobs: Float32 `[rows, vocab]`.
        token_ids: int64 `[rows]`: whose rank is asked for.
        counts: How many of the likeliest tokens, for each row, at most vocab.

    Returns:
        Ids and log-probabilities by falling log-probability, equal ones by rising id; ranks from
        1. Where a row has NaN, it may be short.
    """
    logprobs, token_ids = logprobs.contiguous(), token_ids.contiguous()
    rows, vocab = logprobs.shape
    wanted = np.array(counts, dtype=np.int64)
    most = int(wanted.max(initial=0))
    ids, values = np.empty((rows, most), np.int64), np.empty((rows, most), np.float32)
    ranks = np.empty(rows, np.int64)
    lib.top_logprobs(
        logprobs.data_ptr(),
        rows,
        vocab,
        token_ids.data_ptr(),
        wanted.ctypes.data,
        most,
        *(array.ctypes.data for array in (ids, values, ranks)),
    )
    found = (ids >= 0).sum(1).tolist()
    cut = [min(count, there) for count, there in zip(counts, found, strict=True)]
    return (
        [row[:n] for row, n in zip(ids.tolist(), cut, strict=True)],
        [row[:n] for row, n in zip(values.tolist(), cut, strict=True)],
        ranks.tolist(),
    )


def _rows_of_numbers(x: Tensor) -> Tensor:
    assert x.dtype == torch.float32, f"rows of float32, got {x.dtype}"
    return x if x.stride(1) == 1 else x.contiguous()


OPS: Final[dict[str, Callable[..., Any]]] = {
    "finite_rows": finite_rows,
    "keep_allowed": keep_allowed,
    "log_softmax": log_softmax,
    "pick_tokens": pick_tokens,
    "top_logprobs": top_logprobs,
}
"""Operations that replace those of the reference."""
