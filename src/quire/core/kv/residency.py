"""Measures how long cached content stays in its block, for `--kv-cache-metrics`.

A sample of the blocks is followed from the moment they are taken for new tokens: when a lookup
finds them, when their last holder frees them, and when their content is evicted. It knows no
requests; the pool reports what happens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final

from quire.core.kv.block import KVBlock
from quire.utils.timing import Clock

Stay = tuple[float, float, list[float]]
"""Of a block whose content was evicted, in seconds: how long ago it was taken for that content, how
long ago it was last used, and the gaps between the lookups that found it."""

MAX_GAPS: Final = 16
"""Only so many gaps of one stay are kept, the latest: a block that every prompt shares would gather
them without bound."""


class _Followed:
    """Times of one block that is followed."""

    __slots__ = ("found", "gaps", "taken", "used")

    def __init__(self, now: float) -> None:
        self.taken = self.found = self.used = now
        self.gaps: list[float] = []


class BlockResidency:
    """Follows a sample of the blocks of a pool.

    Args:
        sample: Share of the blocks taken, above 0 and at most 1.
        clock: Monotonic seconds.
    """

    def __init__(self, sample: float, clock: Clock) -> None:
        self._sample = sample
        self._clock = clock
        # Which blocks are followed must not depend on anything that a prompt could aim at.
        self._random = random.Random(0)
        self._followed: dict[int, _Followed] = {}
        self._stays: list[Stay] = []

    def taken(self, blocks: Iterable[KVBlock]) -> None:
        """Blocks were taken for new tokens."""
        now = self._clock.now()
        for block in blocks:
            if self._random.random() < self._sample:
                self._followed[block.block_id] = _Followed(now)
            else:
                self._followed.pop(block.block_id, None)

    def found(self, blocks: Iterable[KVBlock]) -> None:
        """A lookup found blocks, and a request holds them now."""
        for block in blocks:
            followed = self._followed.get(block.block_id)
            if followed is not None:
                now = self._clock.now()
                followed.gaps = [*followed.gaps[1 - MAX_GAPS :], now - followed.found]
                followed.found = followed.used = now

    def released(self, block: KVBlock) -> None:
        """Nobody holds a block any more."""
        followed = self._followed.get(block.block_id)
        if followed is not None:
            followed.used = self._clock.now()

    def evicted(self, block: KVBlock) -> None:
        """A block's cached content is given up for new tokens."""
        followed = self._followed.pop(block.block_id, None)
        if followed is not None:
            now = self._clock.now()
            self._stays.append((now - followed.taken, now - followed.used, followed.gaps))

    def keep(self, blocks: Iterable[KVBlock]) -> None:
        """Stop following all blocks but these: no other has content any more."""
        known = self._followed
        self._followed = {b.block_id: known[b.block_id] for b in blocks if b.block_id in known}

    def take(self) -> list[Stay]:
        """The stays that have ended since the last call."""
        stays, self._stays = self._stays, []
        return stays
