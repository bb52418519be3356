"""How products are split along K, so that tensor-parallel ranks can share one and get the same
bits.

Some layers have their input split over ranks: attention's output projection and an MLP's down
projection. Such a layer divides K into L equal parts, the leaves, sums each leaf on its own, and
adds the leaves' float32 sums as a binary tree of neighbours: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 +
7)). Each of R ranks holds L / R neighbouring leaves, which form a branch of the tree. So the result
is the same for every R that divides L, and at most L ranks can share the product. The split belongs
to the layer and is the same on a single rank.

Knows sizes only, no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MOST_LEAVES: Final = 8
"""Largest number of leaves, and so of ranks that can share a product."""
TILE: Final = 64
"""Columns of an MLP's inner size that always stay on one rank."""


def head_leaves(heads: int, kv_heads: int, width: int) -> int:
    """Leaves of a product over all heads' outputs, each `width` wide.

    The unit is a query head. The same number of ranks must also be able to share the KV heads:
    either each rank has some of them, or several ranks have the same one.
    """
    return _largest(heads, width, lambda n: kv_heads % n == 0 or n % kv_heads == 0)


def inner_leaves(size: int) -> int:
    """Leaves of a product over an MLP's inner `size`. The unit is a tile of 64.

    A size that is not a whole number of tiles is not split: it has 1 leaf.
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
