"""Log-probabilities of chosen and likeliest tokens, and ranks.

Order is by falling log-probability, equal ones by rising token id, everywhere: in the list of
likeliest tokens and in the rank. Whatever a library's top-k does with equals never shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.dispatch import Ops
from quire.kernels.dispatch import ops as default


class LogprobRow(NamedTuple):
    """Log-probabilities at one position."""

    token_ids: list[int]
    """The sampled token, the likeliest in order, then those that the caller named. The sampled one
    may be there again, and so may a named one."""
    logprobs: list[float]
    """Natural logarithms, parallel to `token_ids`."""
    rank: int
    """Rank of the sampled token in the vocabulary, from 1."""


def gather_logprobs(
    logprobs: Tensor,
    token_ids: Tensor,
    num_logprobs: Sequence[int],
    ops: Ops = default,
    named: Sequence[Sequence[int]] | None = None,
) -> list[LogprobRow]:
    """Pick out what a caller asked for.

    Args:
        logprobs: float32 `[rows, vocab]`.
        token_ids: int64 `[rows]`, the chosen token of each row.
        num_logprobs: For each row, how many of the likeliest tokens; -1 for all.
        ops: Of the model; by default the process's.
        named: For each row, ids of the vocabulary that the caller wants to know of; `None`: none.
    """
    vocab = logprobs.shape[1]
    counts = [vocab if n < 0 else min(n, vocab) for n in num_logprobs]
    search = ops.top_logprobs if logprobs.device.type == "cpu" else None
    ids, values, ranks = (search or top_logprobs)(logprobs, token_ids, counts)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).flatten().tolist()
    parts = zip(token_ids.tolist(), chosen, ids, values, ranks, strict=True)
    found = [LogprobRow([t, *more], [lp, *lps], rank) for t, lp, more, lps, rank in parts]
    for row, wanted in enumerate(named or ()):
        if wanted:
            found[row].token_ids.extend(wanted)
            found[row].logprobs.extend(logprobs[row, wanted].tolist())
    return found


def top_logprobs(
    logprobs: Tensor, token_ids: Tensor, counts: Sequence[int]
) -> tuple[list[list[int]], list[list[float]], list[int]]:
    """Ids and values of the likeliest `counts[i]` tokens of each row, and ranks of `token_ids`."""
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = 1 + _count_before(logprobs, chosen, token_ids)
    tops = _top(logprobs, counts)
    return [ids for ids, _ in tops], [values for _, values in tops], ranks.tolist()


def _count_before(logprobs: Tensor, chosen: Tensor, token_ids: Tensor) -> Tensor:
    """How many tokens stand before the chosen one: likelier, or equal with a lower id."""
    before = (logprobs > chosen).sum(1)
    equal = logprobs == chosen
    if bool((equal.sum(1) > 1).any()):
        ids = torch.arange(logprobs.shape[1], device=logprobs.device)
        before += (equal & (ids < token_ids.unsqueeze(1))).sum(1)
    return before


def _top(logprobs: Tensor, counts: Sequence[int]) -> list[tuple[list[int], list[float]]]:
    """The likeliest `counts[i]` tokens of each row `i`, in order."""
    found: list[tuple[list[int], list[float]]] = [([], [])] * len(counts)
    for count in set(counts) - {0}:
        rows = [i for i, c in enumerate(counts) if c == count]
        part = logprobs if len(rows) == len(counts) else logprobs[rows]
        for row, entry in zip(rows, _top_same(part, count), strict=True):
            found[row] = entry
    return found


def _top_same(logprobs: Tensor, count: int) -> list[tuple[list[int], list[float]]]:
    """The likeliest `count` tokens of every row. One more is looked at to notice equals."""
    values, ids = torch.topk(logprobs, min(count + 1, logprobs.shape[1]), dim=1)
    tied = (values[:, :-1] == values[:, 1:]).any(1).tolist()
    result = list(zip(ids[:, :count].tolist(), values[:, :count].tolist(), strict=True))
    for row, unclear in enumerate(tied):
        if unclear:
            result[row] = _top_ordered(logprobs[row], count, values[row, count - 1])
    return result


def _top_ordered(row: Tensor, count: int, least: Tensor) -> tuple[list[int], list[float]]:
    """`_top_same` for one row with equal values: a stable sort keeps ids rising."""
    ids = (row >= least).nonzero().flatten()
    values, order = torch.sort(row[ids], descending=True, stable=True)
    return ids[order[:count]].tolist(), values[:count].tolist()
