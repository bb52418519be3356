"""Which cached content was given up of late: so that a prompt which asks for it again can be told
from one that was never seen.

Knows hashes of blocks, nothing of what is in them or of who asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Final

MAX_HASHES: Final = 65536
"""Remembered at most: about ten megabytes."""


class EvictedContent:
    """Hashes of the blocks that were given up last, about as many as the pool has.

    What is found here, a pool of twice the size would still have.

    Args:
        num_blocks: Blocks of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._most = max(1, min(num_blocks, MAX_HASHES) // 2)
        # Two generations: when the younger one is full the older one is forgotten, at no cost for
        # each hash.
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def add(self, block_hash: bytes) -> None:
        """This content was given up."""
        if len(self._young) >= self._most:
            self._old, self._young = self._young, set()
        self._young.add(block_hash)

    def count_run(self, hashes: Iterable[bytes]) -> int:
        """How many of consecutive blocks were given up, up to the first that was not."""
        return sum(1 for _ in takewhile(self._has, hashes))

    def clear(self) -> None:
        """Forget everything."""
        self._young, self._old = set(), set()

    def _has(self, block_hash: bytes) -> bool:
        return block_hash in self._young or block_hash in self._old
