"""Block tables: which blocks of the pool each request holds, one table per group of layers.

The KV books that looking up, allocating and swapping share. They know how blocks are cut and how
many a request may need; they know no prefixes, no second tier and no policy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from quire.config.kv_groups import blocks_per_request, most_blocks
from quire.core.batch import BlockIds
from quire.core.kv.hits import GroupBlocks
from quire.core.kv.holding import Holding
from quire.core.kv.pool import BlockPool
from quire.utils.math import cdiv


class BlockTables:
    """The holdings of all requests over one pool.

    Args:
        pool: Where the blocks come from.
        block_size: Tokens per block.
        windows: Of each group of layers, the positions a token sees; `None`: all before it.
        max_model_len: Longest request, in tokens; caps what is reserved ahead.
        max_chunk_tokens: Slots that one step takes for a request at most. Counts only where there
            are windows: a group with a window never holds more than it and one step's tokens.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        windows: Sequence[int | None],
        max_model_len: int,
        max_chunk_tokens: int,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.windows = tuple(windows)
        self.windowed = [(g, w) for g, w in enumerate(self.windows) if w is not None]
        """The groups that have a window, with it."""
        self.max_model_len = max_model_len
        self.max_chunk_tokens = max_chunk_tokens if self.windowed else 2**62
        self.held: dict[str, Holding] = {}
        """By request id; a request that holds nothing is not in it."""

    def hold(self, request_id: str, held: Holding) -> None:
        """A request that holds nothing gets blocks that were taken for it."""
        assert request_id not in self.held, f"{request_id} holds blocks"
        self.held[request_id] = held

    def ids_of(self, request_id: str) -> BlockIds:
        """Block tables of a request, one per group; empty if it holds none."""
        held = self.held.get(request_id)
        return () if held is None else ids_from(held.tables)

    def num_blocks_of(self, request_id: str) -> int:
        """How many blocks a request holds."""
        held = self.held.get(request_id)
        return 0 if held is None else held.num_held

    def num_slots_of(self, request_id: str) -> int:
        """For how many tokens a request has room."""
        held = self.held.get(request_id)
        return 0 if held is None else len(held) * self.block_size

    def num_blocks_in(self, hits: GroupBlocks) -> int:
        """How many blocks a prefix hit has in all groups together."""
        if not self.windowed:
            return sum(map(len, hits))
        return sum(not block.is_null for blocks in hits for block in blocks)

    def lacking_blocks(self, num_tokens: int, hits: GroupBlocks) -> int:
        """Blocks that are too few to bring the first `num_tokens` tokens of a request in, which
        has a prefix hit; 0 or less if there is room."""
        num_slots, num_hit = min(num_tokens, self.max_model_len), num_positions(hits)
        # Hit blocks that nobody holds count as free, but will not be once they are held.
        needed = self.pool.count_free(hits)
        for window in self.windows:
            most = most_blocks(window, num_slots, self.max_chunk_tokens, self.block_size)
            needed += min(cdiv(num_slots, self.block_size) - num_hit, most)
        return needed - self.pool.get_num_free_blocks()

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest request that the whole pool can hold, in whole blocks."""
        room = self.pool.num_blocks - 1
        longest = max(room, cdiv(self.max_model_len, self.block_size)) if self.windowed else room
        # What a request holds at most grows with its length: search for where it exceeds the room.
        return self.block_size * bisect_right(range(1, longest + 1), room, key=self._most_blocks)

    def _most_blocks(self, length: int) -> int:
        """Blocks that a request of so many whole blocks holds at most."""
        tokens = length * self.block_size
        return blocks_per_request(self.windows, tokens, self.max_chunk_tokens, self.block_size)

    def check_integrity(self) -> None:
        """Check the tables against each other and the pool.

        Raises:
            AssertionError: naming what is wrong.
        """
        for _ in self.integrity_parts():
            pass

    def integrity_parts(self) -> Iterator[None]:
        """`check_integrity` part by part: the tables may change between two."""
        yield from self.pool.integrity_parts(
            lambda: (table for held in self.held.values() for table in held.tables)
        )
        for request_id in list(self.held):
            if (held := self.held.get(request_id)) is not None:
                _check_held(request_id, held)
                yield


def _check_held(request_id: str, held: Holding) -> None:
    assert held.num_cached <= len(held), f"{request_id}: more cached than held"
    ids = [b.block_id for table in held.tables for b in table if not b.is_null]
    assert len(ids) == len(set(ids)), f"{request_id} holds a block twice: {ids}"
    for group, table in enumerate(held.tables):
        assert len(table) == len(held), f"{request_id}: tables of different lengths"
        nulls = [b.is_null for b in table]
        unseen = held.num_unseen[group]
        assert all(nulls[:unseen]) and not any(nulls[unseen:]), (
            f"{request_id}, group {group}: null blocks are not the first {unseen}: {nulls}"
        )
        assert all(b.origin.group == group for b in table if b.origin is not None), (
            f"{request_id} holds another group's blocks in group {group}"
        )


def num_positions(hits: GroupBlocks) -> int:
    """Blocks of a prefix hit in each group, the null ones too."""
    return len(hits[0]) if hits else 0


def ids_from(tables: GroupBlocks, start: int = 0) -> BlockIds:
    """Ids of the blocks from place `start` on, of each table."""
    return tuple([block.block_id for block in table[start:]] for table in tables)
