"""A KV block, and the queue of free blocks.

The queue is an intrusive doubly linked list. A prefix hit on an unused block takes it out of the
middle of the queue: here that costs O(1), while a deque would search for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Origin(NamedTuple):
    """Where the content of blocks that were made findable together comes from."""

    tokens: list[int]
    """The request's own list, so that nothing is copied."""
    ready_at: int
    """The step from which on the content can be read: until then it is still being computed."""
    group: int
    """The group of layers whose KV it is."""


class KVBlock:
    """One block. It is *held* (`ref_cnt` > 0), *cached* (free, but its content can be found) or
    *empty* (free, and nothing to be found in it)."""

    __slots__ = (
        "block_hash",
        "block_id",
        "follower",
        "is_null",
        "leader",
        "next_free",
        "origin",
        "parent",
        "prev_free",
        "ref_cnt",
        "span",
    )

    def __init__(self, block_id: int, is_null: bool = False) -> None:
        self.block_id = block_id
        self.is_null = is_null
        """Block 0: a placeholder, never allocated, never freed."""
        self.ref_cnt = int(is_null)
        # The fields from here to the links of the queue are set while the content can be found.
        self.block_hash: bytes | None = None
        """Of a full block: the hash of its content and all before it."""
        self.parent: bytes | None = None
        """The hash of all that comes before it."""
        self.origin: Origin | None = None
        self.span = (0, 0)
        """First and end position of the tokens of the origin that it holds."""
        self.leader: KVBlock | None = None
        """The block with the hash `parent` whose `follower` this is, if there is one."""
        self.follower: KVBlock | None = None
        """One of the blocks whose content goes on from here. Further ones are found by `parent`."""
        self.prev_free: KVBlock | None = None
        self.next_free: KVBlock | None = None

    @property
    def token_ids(self) -> list[int]:
        """The tokens whose KV can be found here: all of a full block, or the beginning of a partial
        one."""
        return self.origin.tokens[slice(*self.span)] if self.origin is not None else []

    def __repr__(self) -> str:
        mark = self.block_hash.hex()[:8] if self.block_hash else None
        return f"KVBlock({self.block_id}, ref_cnt={self.ref_cnt}, hash={mark})"


class FreeBlockQueue:
    """Free blocks in the order they will be reused: left first. Least recently released cached
    blocks stand left of more recently released ones; empty blocks stand left of all."""

    def __init__(self, blocks: Iterable[KVBlock] = ()) -> None:
        self._head = KVBlock(-1)
        self._tail = KVBlock(-2)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self._count = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[KVBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def walk(self) -> list[KVBlock]:
        """The blocks in order, as far as the links lead: an exception may have left them half
        changed."""
        found: dict[KVBlock, None] = {}
        block = self._head.next_free
        while block is not None and block.block_id >= 0 and block not in found:
            found[block] = None
            block = block.next_free
        return list(found)

    def popleft(self, count: int) -> list[KVBlock]:
        """Take the blocks to be reused first.

        Raises:
            IndexError: there are fewer.
        """
        if count > self._count:
            raise IndexError(f"{count} KV blocks wanted, {self._count} free")
        taken: list[KVBlock] = []
        block = self._head.next_free
        for _ in range(count):
            assert block is not None, "the count is kept"
            taken.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        assert block is not None, "the tail stands behind all"
        # The rest is linked to the head once, not once per block.
        self._head.next_free, block.prev_free = block, self._head
        self._count -= count
        return taken

    def remove(self, block: KVBlock) -> None:
        """Take a block out from wherever it stands."""
        before, after = block.prev_free, block.next_free
        assert before is not None and after is not None, f"{block} is not in the free queue"
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self._count -= 1

    def append(self, block: KVBlock) -> None:
        """Put at the right: reused last."""
        assert self._tail.prev_free is not None
        self._link(self._tail.prev_free, block, self._tail)

    def prepend(self, block: KVBlock) -> None:
        """Put at the left: reused first."""
        assert self._head.next_free is not None
        self._link(self._head, block, self._head.next_free)

    def _link(self, before: KVBlock, block: KVBlock, after: KVBlock) -> None:
        assert block.prev_free is None and block.next_free is None, f"{block} is already free"
        before.next_free = after.prev_free = block
        block.prev_free, block.next_free = before, after
        self._count += 1
