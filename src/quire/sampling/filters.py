"""Steps after the greedy pick: temperature, then min-p, top-k, top-p, each on rows that need it.

A filter only ever sets logits to -inf. Ties are broken by token id: of equal logits at the edge
of top-k or top-p, those with the lowest ids stay, so `top_k=1` is the greedy token.

A token's weight is `exp(logit)` in multiples of 2**-43, rounded down to a whole number. Sums of
whole numbers are exact in any order, so every way to compute them, sorted or not, decides alike.
Rounding takes at most 2**-43 from a token's share, which is less than the error of float32's `exp`.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from quire.kernels.exact import exp
from quire.sampling.metadata import SamplerState

NUCLEUS: Final = 256
"""Likeliest tokens that top-p looks at first; for rows that need more, 16 times as many, and so
on. The result is the same: only the time differs."""
WEIGHT_ONE: Final = 2.0**43
"""Weight of the likeliest token. Sums stay within int64 for vocabularies below 2**20 tokens."""
SPARSE: Final = 16
"""Where less than one in so many tokens is left, only those go through `exp`."""


def temperature(state: SamplerState) -> None:
    """Divide by the temperature, after subtracting the row's largest logit.

    The shift does not change probabilities, and nothing can overflow afterwards: the largest
    value is 0.
    """
    for rows, logits in state.slabs("temperature"):
        divisor = state.column([state.meta.requests[r].params.temperature for r in rows])
        state.store(rows, (logits - logits.amax(1, keepdim=True)) / divisor)


def min_p(state: SamplerState) -> None:
    """Drop tokens less likely than `min_p` times the likeliest, whose logit is now 0."""
    for rows, logits in state.slabs("min_p"):
        least = state.column([math.log(state.meta.requests[r].params.min_p) for r in rows])
        state.store(rows, logits.masked_fill(logits < least, -math.inf))


def top_k(state: SamplerState) -> None:
    """Keep the `top_k` likeliest tokens."""
    for rows, logits in state.slabs("top_k"):
        counts = [min(state.meta.requests[r].params.top_k, logits.shape[1]) for r in rows]
        keep = state.column(counts, torch.int64)
        # Values of top-k are exact whatever k is; its order of equals is not used.
        values = torch.topk(logits, max(counts), dim=1).values
        state.store(rows, keep_first(logits, keep, values.gather(1, keep - 1)))


def top_p(state: SamplerState) -> None:
    """Keep the smallest set of likeliest tokens whose probability reaches `top_p`."""
    for rows, logits in state.slabs("top_p"):
        share = state.column([state.meta.requests[r].params.top_p for r in rows], torch.float64)
        target = (cumulative(logits)[:, -1:].double() * share).ceil_().to(torch.int64)
        width, vocab = NUCLEUS, logits.shape[1]
        keep, least, short = _nucleus(logits, target, min(width, vocab))
        while short:
            width *= 16
            found = _nucleus(logits[short], target[short], min(width, vocab))
            keep[short], least[short], still = found
            short = [short[i] for i in still]
        state.store(rows, keep_first(logits, keep, least))


def _nucleus(logits: Tensor, target: Tensor, width: int) -> tuple[Tensor, Tensor, list[int]]:
    """How many of the `width` likeliest tokens are needed to reach a mass.

    Returns:
        Number to keep `[n, 1]`, the smallest logit kept `[n, 1]`, and the rows whose `width`
        likeliest tokens do not reach it.
    """
    values = torch.topk(logits, width, dim=1).values
    mass = cumulative(values)
    # A token stays if those before it do not reach the target; the first one always does.
    keep = 1 + torch.count_nonzero(mass[:, :-1] < target, dim=1).unsqueeze(1)
    is_short = mass[:, -1] < target[:, 0]
    short = is_short.nonzero().flatten().tolist() if width < logits.shape[1] else []
    return keep, values.gather(1, keep - 1), short


def cumulative(logits: Tensor) -> Tensor:
    """Running sums of weights along each row, int64, first to last. Logits are at most 0."""
    alive = logits > -math.inf
    if int(torch.count_nonzero(alive)) * SPARSE < logits.numel():
        # A filter has been here. exp(-inf) is 0, so leaving it out changes nothing.
        each = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
        each[alive] = weights(logits[alive])
    else:
        each = weights(logits)
    return torch.cumsum(each, dim=1)


def weights(logits: Tensor) -> Tensor:
    """Weights of tokens by their logits, which are at most 0: int64 of the same shape."""
    return (exp(logits) * WEIGHT_ONE).to(torch.int64)


def keep_first(logits: Tensor, keep: Tensor, least: Tensor) -> Tensor:
    """Mask all but the first `keep` tokens by (falling logit, rising id).

    Args:
        logits: `[n, vocab]`.
        keep: int64 `[n, 1]`, how many stay.
        least: `[n, 1]`, the logit of the last one that stays.
    """
    stays = logits > least
    edge = logits == least
    room = keep - torch.count_nonzero(stays, dim=1).unsqueeze(1)
    if bool((torch.count_nonzero(edge, dim=1).unsqueeze(1) > room).any()):
        edge &= torch.cumsum(edge, dim=1) <= room
    return logits.masked_fill(~(stays | edge), -math.inf)
