"""How products are cut along K, so that tensor-parallel ranks can share one and keep its bits.

A layer whose input is spread over ranks (attention's output projection, an MLP's down projection)
sums each of L equal parts of K, its leaves, on its own, and adds the leaves' float32 sums as a
binary tree of neighbours: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). R ranks hold L / R
neighbouring leaves each, that is a branch of the tree, so the result is the same for every R that
divides L, and L is the largest number of ranks. The cut is the layer's own, on one rank too.

Knows sizes only, no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MOST_LEAVES: Final = 8
"""As many ranks as can share a product."""
TILE: Final = 64
"""Columns of an MLP's inner size that no rank divides."""


def head_leaves(heads: int, kv_heads: int, width: int) -> int:
    """Leaves of a product over all heads' outputs, each `width` wide.

    The unit is a query head. As many ranks must also be able to share the KV heads: each has some
    of them, or some have the same one.
    """
    return _largest(heads, width, lambda n: kv_heads % n == 0 or n % kv_heads == 0)


def inner_leaves(size: int) -> int:
    """Leaves of a product over an MLP's inner `size`. The unit is a tile of 64.

    What is no whole number of tiles is not cut.
    """
    return 1 if size % TILE else _largest(size // TILE, TILE)


def _largest(units: int, width: int, fits: Callable[[int], bool] = lambda n: True) -> int:
    """The largest power of two that divides the units and leaves whole pairs of columns."""
    found = 1
    while found < MOST_LEAVES and units % (2 * found) == 0 and fits(2 * found):
        found *= 2
    # bf16 weights stand in pairs: no leaf begins inside one.
    while found > 1 and units // found * width % 2:
        found //= 2
    return found
