"""Attention of encoders in plain torch: in both directions, within whole prompts.

The definition that faster ones are tested against. A row's result depends on its own request
alone: attention is one fixed computation per request, because an encoder's prompt is never cut.
Knows nothing of models.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from quire.kernels.exact import exp_, tree_sum

_QUERY_ROWS: Final = 512
"""Query rows of a long prompt that are computed at once. A constant: it is part of the result."""


def encoder_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of `q, k, v [T, H, D]` within each request, in both directions: `[T, H, D]`.

    Args:
        query_start_loc: `[R + 1]` int32: request r owns tokens `loc[r] .. loc[r + 1]`, all of its
            prompt.
        window: A token sees those at most this far away; `None`: all of its request.
    """
    out = torch.empty_like(q)
    bounds = query_start_loc.tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):
        own = slice(start, end)
        out[own] = _attend(q[own], k[own], v[own], scale, window)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """One request: `[n, H, D]`. Fresh contiguous copies, so that no address matters."""
    queries = _heads_first(q).mul_(scale)
    keys, values = _heads_first(k), _heads_first(v)
    length, reach = q.shape[0], q.shape[0] if window is None else window
    parts = []
    for first in range(0, length, _QUERY_ROWS):
        end = min(first + _QUERY_ROWS, length)
        seen = slice(max(0, first - reach), min(length, end + reach))
        scores = torch.bmm(queries[:, first:end], keys[:, seen].transpose(1, 2))
        if window is not None:
            scores.masked_fill_(_far(first, end, seen, window, q.device), -torch.inf)
        weights = exp_(scores.sub_(scores.amax(-1, keepdim=True)))
        parts.append(torch.bmm(weights, values[:, seen]).div_(tree_sum(weights).unsqueeze(-1)))
    return torch.cat(parts, dim=1).transpose(0, 1).to(q.dtype)


def _heads_first(x: Tensor) -> Tensor:
    """`[n, H, D]` to float32 `[H, n, D]`."""
    return x.transpose(0, 1).to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _far(first: int, end: int, seen: slice, window: int, device: torch.device) -> Tensor:
    """`[rows, keys]`: which of the keys `seen` lie outside the window of rows `first .. end`."""
    rows = torch.arange(first, end, device=device).unsqueeze(1)
    return (torch.arange(seen.start, seen.stop, device=device) - rows).abs_() > window
