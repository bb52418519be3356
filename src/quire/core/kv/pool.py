"""The block pool: allocate, share, free, evict, look up by content.

It counts references and knows hashes; it knows nothing of requests or scheduling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from quire.core.kv.block import FreeBlockQueue, KVBlock


class BlockPool:
    """A fixed number of blocks made once. Block 0 is the null block.

    Args:
        num_blocks: All blocks, the null block included; at least 2.
        enable_caching: Whether freed blocks keep their hash and can be found again.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"a pool needs at least 2 blocks (one is the null block), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVBlock(i, is_null=i == 0) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self._free = FreeBlockQueue(self.blocks[1:])
        self._cached: dict[bytes, dict[int, KVBlock]] = {}
        self.num_evicted = 0
        """Cached blocks whose content was given up for new tokens, since start."""

    def get_num_free_blocks(self) -> int:
        """Blocks nobody holds; cached ones count."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks that are held, 0 to 1."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    def get_cached_block(self, block_hash: bytes) -> KVBlock | None:
        """A block with this content, held or free. The first of several equal ones."""
        equal = self._cached.get(block_hash)
        return next(iter(equal.values())) if equal else None

    def get_new_blocks(self, count: int) -> list[KVBlock]:
        """Take `count` blocks from the left of the free queue; cached content in them is evicted.

        Raises:
            ValueError: fewer are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} KV blocks wanted, {len(self._free)} free")
        taken = []
        for _ in range(count):
            block = self._free.popleft()
            if block.block_hash is not None:
                self.uncache(block)
                self.num_evicted += 1
            block.ref_cnt = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[KVBlock]) -> None:
        """Hold blocks that a lookup found; free ones leave the free queue."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered: Iterable[KVBlock]) -> None:
        """Give up one reference of each. Blocks nobody holds any more go to the right of the free
        queue if they are cached, in the given order, and to the left if they are empty."""
        empty = []
        for block in ordered:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, f"{block} was freed twice"
            if block.ref_cnt == 0:
                if block.block_hash is None:
                    empty.append(block)
                else:
                    self._free.append(block)
        for block in reversed(empty):
            self._free.prepend(block)

    def cache(self, block: KVBlock, block_hash: bytes) -> None:
        """Make a full block findable. Equal blocks are all kept: nothing is de-duplicated."""
        assert block.block_hash is None, f"{block} already has a hash"
        block.block_hash = block_hash
        self._cached.setdefault(block_hash, {})[block.block_id] = block

    def uncache(self, block: KVBlock) -> None:
        """Forget what a block holds; it stays where it is."""
        if block.block_hash is None:
            return
        equal = self._cached[block.block_hash]
        del equal[block.block_id]
        if not equal:
            del self._cached[block.block_hash]
        block.block_hash = None

    def reset_prefix_cache(self) -> bool:
        """Forget all content. Refused (False) while any block is held."""
        if len(self._free) != self.num_blocks - 1:
            return False
        for block in self.blocks:
            block.block_hash = None
        self._cached.clear()
        return True

    def check_integrity(self, tables: Iterable[Sequence[KVBlock]]) -> None:
        """Compare every reference, link and hash with the block tables that should own them.

        Raises:
            AssertionError: naming the block that is wrong.
        """
        held = Counter(b.block_id for table in tables for b in table if not b.is_null)
        free = list(self._free)
        free_ids = {b.block_id for b in free}
        assert len(free) == len(free_ids) == len(self._free), "the free queue is broken"
        assert 0 not in free_ids, "the null block is in the free queue"
        for block in self.blocks[1:]:
            assert block.ref_cnt == held[block.block_id], (
                f"{block}: {held[block.block_id]} tables hold it"
            )
            assert (block.ref_cnt == 0) == (block.block_id in free_ids), (
                f"{block}: free queue and reference count disagree"
            )
            if block.block_hash is not None:
                assert block.block_id in self._cached.get(block.block_hash, {}), (
                    f"{block}: its hash does not lead to it"
                )
        mapped = sum(len(equal) for equal in self._cached.values())
        hashed = sum(b.block_hash is not None for b in self.blocks)
        assert mapped == hashed, f"{mapped} blocks are mapped, {hashed} carry a hash"
