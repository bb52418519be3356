"""Random numbers without state: Philox4x32-10 keyed by seed, counted by output position.

Philox is a counter-based generator: its output is a fixed mixing of (counter, key), so any
position's number can be had at any time, in any order, by any process. Constants and rounds are
those of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

This module knows integers only; what a number is used for is the sampler's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WEYL: Final = (0x9E3779B9, 0xBB67AE85)
"""Added to the two key words after each round."""
ROUNDS: Final = 10
_MASK: Final = 0xFFFFFFFF
_VECTOR_FROM: Final = 12
"""From this many numbers on, numpy is quicker than plain integers (both give the same bits)."""

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four 32-bit random words for one counter (four 32-bit words, lowest first) and key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low, high = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK, (low >> 32) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return c0, c1, c2, c3


def philox4x32_many(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """`philox4x32` for n counters `[n, 4]` and keys `[n, 2]` of uint64 words; returns `[n, 4]`."""
    c0, c1, c2, c3 = (np.ascontiguousarray(counters[:, i]) for i in range(4))
    k0, k1 = (np.ascontiguousarray(keys[:, i]) for i in range(2))
    mask, shift = np.uint64(_MASK), np.uint64(32)
    m0, m1, w0, w1 = (np.uint64(v) for v in (*MULTIPLIERS, *WEYL))
    for _ in range(ROUNDS):
        low, high = m0 * c0, m1 * c2
        c0, c1, c2, c3 = (
            (high >> shift) ^ c1 ^ k0,
            high & mask,
            (low >> shift) ^ c3 ^ k1,
            low & mask,
        )
        k0, k1 = (k0 + w0) & mask, (k1 + w1) & mask
    return np.stack((c0, c1, c2, c3), axis=1)


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of one output position, with 53 random bits.

    Args:
        seed: Seed of the request; its low 64 bits count.
        position: Number of output tokens before this one.
    """
    counter = (position & _MASK, (position >> 32) & _MASK, 0, 0)
    high, low, _, _ = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return ((high << 21) | (low >> 11)) * 2.0**-53


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> list[float]:
    """`uniform` for parallel lists of seeds and positions."""
    if len(seeds) < _VECTOR_FROM:
        return [uniform(s, p) for s, p in zip(seeds, positions, strict=True)]
    seed_words = np.array([s & (2**64 - 1) for s in seeds], dtype=np.uint64)
    place_words = np.array(positions, dtype=np.uint64)
    mask, shift = np.uint64(_MASK), np.uint64(32)
    counters = np.zeros((len(seeds), 4), dtype=np.uint64)
    counters[:, 0], counters[:, 1] = place_words & mask, place_words >> shift
    keys = np.stack((seed_words & mask, seed_words >> shift), axis=1)
    words = philox4x32_many(counters, keys)
    bits = (words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))
    result: list[float] = (bits.astype(np.float64) * 2.0**-53).tolist()
    return result
