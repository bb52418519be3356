"""Which cached content was evicted lately, so that a prompt that asks for it again can be told from
one that was never seen.

It knows hashes of blocks, but not what is in them or which request asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Final

MAX_HASHES: Final = 65536
"""At most so many are remembered: about ten megabytes."""


class EvictedContent:
    """Hashes of the blocks that were evicted last, about as many as the pool has blocks.

    Whatever is found here would still be in a pool of twice the size.

    Args:
        num_blocks: Blocks of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._most = max(1, min(num_blocks, MAX_HASHES) // 2)
        # Two generations: when the younger one is full, the older one is forgotten as a whole.
        # Keeping the exact order would cost time for every hash.
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def add(self, block_hash: bytes) -> None:
        """A block with this content was evicted."""
        if len(self._young) >= self._most:
            self._old, self._young = self._young, set()
        self._young.add(block_hash)

    def count_run(self, hashes: Iterable[bytes]) -> int:
        """How many of consecutive blocks were evicted, up to the first that was not."""
        return sum(1 for _ in takewhile(self._has, hashes))

    def clear(self) -> None:
        """Forget everything."""
        self._young, self._old = set(), set()

    def _has(self, block_hash: bytes) -> bool:
        return block_hash in self._young or block_hash in self._old
