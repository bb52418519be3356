"""What one request holds: a list of blocks per group of layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from quire.core.kv.block import KVBlock
from quire.core.kv.hits import GroupBlocks


class Holding:
    """Block tables of a request."""

    __slots__ = ("num_cached", "num_unseen", "tables")

    def __init__(self, num_groups: int) -> None:
        self.tables: GroupBlocks = tuple([] for _ in range(num_groups))
        """One block list per group of layers, all of the same length."""
        self.num_unseen = [0] * num_groups
        """How many blocks at the head of each table are null, because no later token sees them."""
        self.num_cached = 0
        """How many blocks at the head of the tables are registered under their hash."""

    def __len__(self) -> int:
        """Blocks of each table, the null ones included."""
        return len(self.tables[0])

    @property
    def num_held(self) -> int:
        """Blocks of the pool that it keeps from others."""
        return len(self) * len(self.tables) - sum(self.num_unseen)

    def from_tail(self) -> Iterator[KVBlock]:
        """All blocks, last position first, in which order they are freed: the tail is the first to
        be evicted, because fewer prompts share it than share the head."""
        if len(self.tables) == 1:
            return reversed(self.tables[0])
        return chain.from_iterable(zip(*map(reversed, self.tables), strict=True))
