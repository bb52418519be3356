"""The exponential race: which of the tokens that are left is chosen.

Every token that is left starts at time 0 and arrives at `E / weight`. The first to arrive is
chosen; of equals, the one with the lowest id. `E` is an exponential random number, so the chance to
win is proportional to the weight. `E` depends on the request's seed, the output position and the
token's id alone:

- What becomes of the other tokens does not touch a token's `E`: banning one that was not chosen
  changes nothing, and two models that nearly agree on the weights mostly choose the same token.
- The order of the ids does not matter.

**The layout is a contract**: every kernel, on every device, computes these bits. Words are of 32
bits, the lowest first; `h` is 0 or 1:

    words(h) = philox4x32(counter = (position % 2**32, position >> 32, token // 4, h),
                          key = (seed % 2**32, seed >> 32))
    k = (words(0)[token % 4] * 2**32 + words(1)[token % 4]) >> 12      52 bits
    u = (k + 1/2) * 2**-52                                             exact in float64
    E = -ln(u)                                                         `exact.log_wide`
    arrival = E / weight                                               float64, rounded once

`seed` has 64 bits, `position` is the number of output tokens so far, and `weight` is the whole
number of `filters.weights`. Everything is linear, not in logarithms: the weights are there
already, one logarithm and one division per token are cheaper than two logarithms, and what has
no weight cannot win. Other values of the last counter word are free for other uses.

Two words, because the first alone would leave tokens below a chance of 2**-32 out, and the long
tail of a large vocabulary is many of those. Kernels look at the second only for tokens that can
still win by the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from quire.kernels import exact
from quire.sampling.filters import weights
from quire.sampling.philox import MASK, philox4x32

TOGETHER: Final = 4
"""Neighbours in the vocabulary whose words are of the same call of Philox."""
SPARE: Final = 1.000001
"""More than roundings can make of a limit."""


def winners(logits: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """The chosen token of each row.

    Args:
        logits: Float32 `[rows, vocab]`, at most 0, one of each row 0; -inf where a filter has been.
        seeds: Of each row; the low 64 bits count.
        positions: Of each row, the number of output tokens so far.

    Returns:
        int64 `[rows]`.
    """
    pairs = zip(seeds, positions, strict=True)
    places = torch.tensor([[p & MASK, p >> 32, s & MASK, s >> 32 & MASK] for s, p in pairs])
    places = places.to(logits.device)
    early = earliest(logits, places)
    each, promising = torch.arange(len(logits), device=logits.device), early.argmin(1)
    limit = arrivals(logits[each, promising], places, promising) * SPARE
    rows, tokens = (early <= limit.unsqueeze(1)).nonzero(as_tuple=True)
    found = torch.full_like(early, torch.inf)
    found[rows, tokens] = arrivals(logits[rows, tokens], places[rows], tokens)
    return found.argmin(1)  # the first of equals


def arrivals(logits: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    """When tokens arrive.

    Args:
        logits: Float32 `[n]`.
        places: int64 `[n, 4]`: the two words of the output position, then those of the seed.
        tokens: int64 `[n]`.

    Returns:
        Float64 `[n]`.
    """
    first, second = (_words(places, tokens // TOGETHER, half) for half in (0, 1))
    column = (tokens % TOGETHER).unsqueeze(1)
    bits = (first.gather(1, column) << 20) | (second.gather(1, column) >> 12)
    exponential = -exact.log_wide((bits.flatten().double() + 0.5) * 2.0**-52)
    return exponential / weights(logits)


def earliest(logits: Tensor, places: Tensor) -> Tensor:
    """When tokens can arrive, going by the first word alone: never later than they do, since
    -ln(u) is more than 1 - u. A logarithm is left to those that can win.

    Args:
        logits: Float32 `[rows, vocab]`.
        places: int64 `[rows, 4]`, as above.

    Returns:
        Float64 `[rows, vocab]`; infinite for tokens without weight.
    """
    count, vocab = logits.shape
    padding = (0, -vocab % TOGETHER)
    fours = torch.nn.functional.pad(logits, padding, value=-torch.inf).view(count, -1, TOGETHER)
    rows, blocks = (fours > -torch.inf).any(-1).nonzero(as_tuple=True)
    left = (MASK - _words(places[rows], blocks, 0)).double()
    weight = weights(fours[rows, blocks])
    early = torch.full(fours.shape, torch.inf, dtype=torch.float64, device=logits.device)
    early[rows, blocks] = (left * 2.0**-32 / weight).masked_fill_(weight == 0, torch.inf)
    return early.view(count, -1)[:, :vocab]


def _words(places: Tensor, blocks: Tensor, half: int) -> Tensor:
    """Random words of four neighbours each, int64 `[n, 4]`."""
    counter = torch.stack((*places[:, :2].unbind(1), blocks, torch.full_like(blocks, half)), dim=1)
    return philox4x32(counter, places[:, 2:])
