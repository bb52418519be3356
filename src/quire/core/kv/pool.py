"""The block pool: blocks are allocated, shared, freed, evicted, and looked up by content.

It counts references and knows hashes; it knows nothing of requests or scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from quire.core.kv.block import FreeBlockQueue, KVBlock, Origin
from quire.core.kv.evicted import EvictedContent
from quire.core.kv.residency import BlockResidency

CANDIDATES = 16
"""At most so many blocks after the same prefix are compared token by token: the latest ones."""
PART = 256
"""Blocks that are checked at a time: a fifth of a millisecond."""


class BlockIndex:
    """Blocks by key; several of one key are kept in order of addition.

    Nearly every key has one block, which is stored as it is. A dictionary for each key would cost
    more than all the rest of registering a block.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, KVBlock | dict[int, KVBlock]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key: bytes, block: KVBlock) -> None:
        """Add a block to those of a key, as the last."""
        found = self._blocks.setdefault(key, block)
        self._count += 1
        if isinstance(found, dict):
            found[block.block_id] = block
        elif found is not block:
            self._blocks[key] = {found.block_id: found, block.block_id: block}

    def add_run(self, keys: Sequence[bytes], blocks: Sequence[KVBlock]) -> None:
        """Add its block to each key, except the null block."""
        setdefault = self._blocks.setdefault
        for key, block in zip(keys, blocks, strict=True):
            if block.is_null:
                continue
            if setdefault(key, block) is block:
                self._count += 1
            else:
                self.add(key, block)

    def remove(self, key: bytes, block: KVBlock) -> None:
        """Take out a block that is there."""
        found = self._blocks[key]
        self._count -= 1
        if isinstance(found, dict):
            del found[block.block_id]
        if found is block or not found:
            del self._blocks[key]

    def first(self, key: bytes) -> KVBlock | None:
        """The oldest block of a key."""
        found = self._blocks.get(key)
        return next(iter(found.values())) if isinstance(found, dict) else found

    def run(self, keys: Iterable[bytes]) -> list[KVBlock]:
        """The oldest block of each key, up to the first key that has none."""
        run: list[KVBlock] = []
        for found in map(self._blocks.get, keys):
            if found is None:
                break
            run.append(next(iter(found.values())) if isinstance(found, dict) else found)
        return run

    def all_of(self, key: bytes) -> list[KVBlock]:
        """All blocks of a key."""
        found = self._blocks.get(key)
        if isinstance(found, dict):
            return list(found.values())
        return [] if found is None else [found]

    def latest(self, key: bytes, limit: int) -> Iterable[KVBlock]:
        """The youngest blocks of a key, youngest first."""
        found = self._blocks.get(key)
        if isinstance(found, dict):
            return islice(reversed(found.values()), limit)
        return () if found is None else (found,)

    def has(self, key: bytes, block: KVBlock) -> bool:
        """Whether a key leads to a block."""
        found = self._blocks.get(key)
        return found is block or (isinstance(found, dict) and found.get(block.block_id) is block)


class BlockPool:
    """A fixed number of blocks made once. Block 0 is the null block.

    Args:
        num_blocks: All blocks, the null block included; at least 2.
        enable_caching: Whether freed blocks keep their hash and can be found again.
        num_groups: Groups of layers that take blocks; equal tokens of two are told apart.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True, num_groups: int = 1) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"a pool needs at least 2 blocks (one is the null block), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVBlock(i, is_null=i == 0) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self._free = FreeBlockQueue(self.blocks[1:])
        # For each group, full blocks by their hash
        self._cached = [BlockIndex() for _ in range(num_groups)]
        # and full and partial blocks by the hash of what comes before them. A full block that is
        # some other block's follower is not in here: it is reached through that one.
        self._children = [BlockIndex() for _ in range(num_groups)]
        self.on_evict: Callable[[KVBlock], None] | None = None
        """Called before the content of a cached block is given up."""
        self.on_take: Callable[[list[KVBlock]], None] | None = None
        """Called with blocks that are taken for new tokens."""
        self.evicted = EvictedContent(num_blocks)
        self.residency: BlockResidency | None = None
        """Follows how long content stays, if that is wanted."""
        self.step = 0
        """Number of the step, counted up by the caller: content that a step computes can be copied
        only in later ones."""
        self.num_allocated = 0
        """Blocks taken for new tokens, since start."""
        self.num_freed = 0
        """Blocks that nobody holds any more, since start."""
        self.num_evicted = 0
        """Cached blocks whose content was given up for new tokens, since start."""
        self.num_missed = 0
        """Blocks that a new request would have found, had they not been evicted, since start."""

    def get_num_free_blocks(self) -> int:
        """Blocks that nobody holds, including those with cached content."""
        return len(self._free)

    def count_free(self, hits: Iterable[list[KVBlock]]) -> int:
        """How many of the blocks that a lookup found are held by nobody."""
        return sum([b.ref_cnt == 0 for blocks in hits for b in blocks])

    @property
    def usage(self) -> float:
        """Share of blocks that are held, 0 to 1."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    def get_cached_block(self, block_hash: bytes, group: int = 0) -> KVBlock | None:
        """A block with this content, held or free; of several equal ones the oldest."""
        return self._cached[group].first(block_hash)

    def find_run(self, hashes: Iterable[bytes], group: int = 0) -> list[KVBlock]:
        """Blocks with these contents, up to the first that is not there."""
        return self._cached[group].run(hashes)

    def get_new_blocks(self, count: int) -> list[KVBlock]:
        """Take `count` blocks from the left of the free queue; cached content in them is evicted.

        Raises:
            ValueError: fewer are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} KV blocks wanted, {len(self._free)} free")
        taken = self._free.popleft(count)
        self.num_allocated += count
        if self.on_take is not None:
            self.on_take(taken)
        for block in taken:
            if block.parent is not None:
                if self.on_evict is not None:
                    self.on_evict(block)
                if self.residency is not None:
                    self.residency.evicted(block)
                if block.block_hash is not None:
                    self.evicted.add(block.block_hash)
                self.uncache(block)
                self.num_evicted += 1
            block.ref_cnt = 1
        if self.residency is not None:
            self.residency.taken(taken)
        return taken

    def touch(self, blocks: Iterable[KVBlock]) -> None:
        """Hold blocks that a lookup found; free ones leave the free queue."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered: Iterable[KVBlock]) -> None:
        """Give up one reference of each block.

        Blocks that nobody holds any more join the free queue: cached ones at the right, in the
        given order, because they are worth keeping longest; empty ones at the left, to be reused
        first.
        """
        empty = []
        for block in ordered:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, f"{block} was freed twice"
            if block.ref_cnt == 0:
                self.num_freed += 1
                if self.residency is not None:
                    self.residency.released(block)
                if block.parent is None:
                    empty.append(block)
                else:
                    self._free.append(block)
        for block in reversed(empty):
            self._free.prepend(block)

    def cache(
        self,
        blocks: Sequence[KVBlock],
        hashes: Sequence[bytes],
        parent: bytes,
        tokens: list[int],
        spans: Iterable[tuple[int, int]],
        group: int = 0,
    ) -> None:
        """Make consecutive full blocks of a request findable, whose content this step computes.

        Blocks of equal content are all kept: a block table only ever grows at its end, so none of
        its blocks is exchanged for an equal one. The null block is skipped.

        Args:
            blocks: In order.
            hashes: Of each.
            parent: Key of what comes before the first.
            tokens: All tokens of the request.
            spans: First and end position of those that each block holds.
            group: The group of layers whose KV it is.
        """
        self._cached[group].add_run(hashes, blocks)
        origin, before = Origin(tokens, self.step + 1, group), None
        for block, block_hash, span in zip(blocks, hashes, spans, strict=True):
            if block.is_null:
                before = None
            else:
                assert block.parent is None, f"{block} already has content"
                block.block_hash, block.parent = block_hash, parent
                block.origin, block.span = origin, span
                if before is None:
                    self._children[group].add(parent, block)
                else:
                    # A link costs much less than an entry in a large dictionary.
                    before.follower, block.leader = block, before
                before = block
            parent = block_hash

    def cache_tail(
        self,
        block: KVBlock,
        parent: bytes,
        tokens: list[int],
        span: tuple[int, int],
        group: int = 0,
    ) -> None:
        """Make the computed beginning of a partial block findable, for copying."""
        if block.parent is None and not block.is_null:
            block.parent, block.span = parent, span
            block.origin = Origin(tokens, self.step, group)
            self._children[group].add(parent, block)

    def _going_on(self, parent: bytes, group: int) -> list[KVBlock]:
        """The latest blocks that come after `parent`."""
        leaders = self._cached[group].latest(parent, CANDIDATES)
        return [
            *self._children[group].latest(parent, CANDIDATES),
            *[leader.follower for leader in leaders if leader.follower is not None],
        ]

    def find_beginning(
        self, parent: bytes, tokens: list[int], group: int = 0
    ) -> tuple[KVBlock | None, int]:
        """The block after `parent` that shares most tokens with `tokens`, and how many."""
        best, most = None, 0
        wanted = tokens[0]
        for block in self._going_on(parent, group):
            origin = block.origin
            # Most blocks differ at once: look before comparing.
            if origin is None or origin.tokens[block.span[0]] != wanted:
                continue
            if origin.ready_at <= self.step:
                shared = _num_shared(block.token_ids, tokens)
                if shared > most:
                    best, most = block, shared
        return best, most

    def uncache(self, block: KVBlock) -> None:
        """Make a block's content unfindable. Whoever holds it keeps it."""
        if block.parent is None or block.origin is None:
            return
        group = block.origin.group
        if block.leader is not None:
            block.leader.follower = None
        else:
            self._children[group].remove(block.parent, block)
        if (follower := block.follower) is not None:
            # It was reached through this block. From now on it has an entry of its own, so that it
            # is found again should its parent's content come back.
            assert follower.parent is not None, "a follower has content"
            follower.leader = None
            self._children[group].add(follower.parent, follower)
        if block.block_hash is not None:
            self._cached[group].remove(block.block_hash, block)
        # The origin first: without one a block has no content, however far this gets.
        block.origin = block.block_hash = block.parent = block.leader = block.follower = None

    def uncache_all(self, block_hash: bytes, group: int = 0) -> list[KVBlock]:
        """Make this content unfindable in every block that has it.

        Returns:
            Those blocks.
        """
        found = self._cached[group].all_of(block_hash)
        for block in found:
            self.uncache(block)
        return found

    def undo(self, step: int) -> None:
        """Take back what happened since `step` was the current one, however far it got: nobody
        holds a block, and only content that was computed by then can be found.

        Content that was evicted since then stays evicted, because it may have been overwritten.
        """
        queued = self._free.walk()
        self._cached = [BlockIndex() for _ in self._cached]
        self._children = [BlockIndex() for _ in self._children]
        for block in self.blocks[1:]:
            self.num_freed += block.ref_cnt > 0
            block.ref_cnt = 0
            block.leader = block.follower = block.prev_free = block.next_free = None
            # What a step computes is registered before it runs, as ready one step later.
            if block.origin is not None and block.origin.ready_at <= step + 1:
                self._find_again(block)
            else:
                block.origin = block.block_hash = block.parent = None
        order = dict.fromkeys((*queued, *self.blocks[1:]))
        self._free = FreeBlockQueue(sorted(order, key=lambda b: b.parent is not None))
        if self.residency is not None:
            self.residency.keep([b for b in order if b.parent is not None])

    def forget_all(self) -> None:
        """Every block is free and empty, whatever the books say."""
        for block in self.blocks:
            block.origin = block.block_hash = block.parent = None
        self.null_block.ref_cnt = 1
        self.undo(self.step)
        self.evicted.clear()

    def _find_again(self, block: KVBlock) -> None:
        assert block.origin is not None and block.parent is not None, "it has content"
        self._children[block.origin.group].add(block.parent, block)
        if block.block_hash is not None:
            self._cached[block.origin.group].add(block.block_hash, block)

    def reset_prefix_cache(self) -> bool:
        """Forget all content. Refused (False) while any block is held."""
        if len(self._free) != self.num_blocks - 1:
            return False
        for block in self.blocks:
            self.uncache(block)
        self.evicted.clear()
        return True

    def drop_free_content(self) -> int:
        """Give up the cached content of all blocks that nobody holds.

        Returns:
            How many blocks had some.
        """
        dropped = 0
        for block in self._free:
            if block.parent is None:
                continue
            if self.residency is not None:
                self.residency.evicted(block)
            if block.block_hash is not None:
                self.evicted.add(block.block_hash)
            self.uncache(block)
            dropped += 1
        return dropped

    def free_ids(self) -> list[int]:
        """Blocks that nobody holds, in ascending order."""
        return sorted(block.block_id for block in self._free)

    def check_integrity(self, tables: Iterable[Sequence[KVBlock]]) -> None:
        """Compare every reference, link and hash with the given block tables, which must be all
        there are.

        Raises:
            AssertionError: naming the block that is wrong.
        """
        held = list(tables)
        for _ in self.integrity_parts(lambda: held):
            pass

    def integrity_parts(self, tables: Callable[[], Iterable[Sequence[KVBlock]]]) -> Iterator[None]:
        """`check_integrity` part by part: the pool may change between two. Of a large pool most
        time goes into what blocks know of each other, which is looked at for some at a time.

        Args:
            tables: All there are at that time.
        """
        self._check_references(tables())
        yield
        self._check_counts()
        yield
        for start in range(1, self.num_blocks, PART):
            for block in self.blocks[start : start + PART]:
                _check_links(block)
                self._check_found(block)
            yield

    def _check_references(self, tables: Iterable[Sequence[KVBlock]]) -> None:
        held = [0] * self.num_blocks
        for table in tables:
            for block in table:
                held[block.block_id] += 1
        held[0] = 1  # of the null block places in tables do not count
        found = [block.ref_cnt for block in self.blocks]
        if found != held:
            wrong = next(i for i in range(self.num_blocks) if found[i] != held[i])
            raise AssertionError(f"{self.blocks[wrong]}: {held[wrong]} tables hold it")
        assert self.null_block.parent is None, "the null block is used"
        queued, unheld = len(self._free), found.count(0)
        assert queued == unheld, f"the free queue is broken: {queued} of {unheld} blocks"

    def _check_counts(self) -> None:
        # Lists that are counted: a third of the time of sums.
        hashed = self.num_blocks - [block.block_hash for block in self.blocks].count(None)
        known = [block.leader for block in self.blocks if block.parent is not None].count(None)
        mapped, adopted = sum(map(len, self._cached)), sum(map(len, self._children))
        assert mapped == hashed, f"{mapped} mapped, {hashed} carry a hash"
        assert adopted == known, f"{adopted} adopted, {known} know it"

    def _check_found(self, block: KVBlock) -> None:
        """Check that both its hash and its parent lead to a block."""
        if block.parent is None or block.origin is None:
            assert not (block.block_hash or block.leader or block.follower), f"{block} is empty"
            return
        assert block.origin.ready_at <= self.step + 1, f"{block} is ready in a later step"
        group = block.origin.group
        if block.block_hash is not None:
            found = self._cached[group].has(block.block_hash, block)
            assert found, f"{block}: its hash does not lead to it"
        if block.leader is None:
            found = self._children[group].has(block.parent, block)
            assert found, f"{block}: its parent lost it"
        else:
            assert block.leader.block_hash == block.parent, f"{block} follows another"
            assert block.leader.follower is block, f"{block}: its leader lost it"


def _num_shared(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def _check_links(block: KVBlock) -> None:
    """Check that its neighbours in the free queue lead to it, or that it has none."""
    before, after = block.prev_free, block.next_free
    if block.ref_cnt:
        assert before is None and after is None, f"{block} is held and linked"
        return
    led = before is not None and before.next_free is block
    leads = after is not None and after.prev_free is block
    assert led and leads, f"the free queue is broken at {block}"
