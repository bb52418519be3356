"""Philox4x32-10, a random number generator without state.

A number is a fixed mixing of (counter, key), so any one can be had at any time, in any order, by
any process. Constants and rounds are those of Salmon et al., "Parallel random numbers: as easy as
1, 2, 3" (SC 2011).

This module knows integers only; what a number is used for is the sampler's business.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WEYL: Final = (0x9E3779B9, 0xBB67AE85)
"""Added to the two key words after each round."""
ROUNDS: Final = 10
MASK: Final = 0xFFFFFFFF


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Four 32-bit random words for each counter and key.

    Args:
        counter: int64 `[n, 4]` of 32-bit words, lowest first.
        key: int64 `[n, 2]`, likewise.

    Returns:
        int64 `[n, 4]`.
    """
    c0, c1, c2, c3 = (column.contiguous() for column in counter.unbind(1))
    k0, k1 = (column.contiguous() for column in key.unbind(1))
    for _ in range(ROUNDS):
        # Products need 64 bits without a sign: they wrap, and lose the sign when cut to a word.
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = _upper(high).bitwise_xor_(c1).bitwise_xor_(k0), high.bitwise_and_(MASK)
        c2, c3 = _upper(low).bitwise_xor_(c3).bitwise_xor_(k1), low.bitwise_and_(MASK)
        k0, k1 = (k0 + WEYL[0]).bitwise_and_(MASK), (k1 + WEYL[1]).bitwise_and_(MASK)
    return torch.stack((c0, c1, c2, c3), dim=1)


def _upper(x: Tensor) -> Tensor:
    return x.bitwise_right_shift(32).bitwise_and_(MASK)
