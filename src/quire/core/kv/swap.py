"""The second KV tier: what is copied to it, and what comes back.

The copies are only described here; the worker makes them.

There are three ways in and out:

- A preempted request can be *swapped out*: all its blocks are copied here and pinned, and it goes
  on from them when there is room again.
- A cached block whose place in the pool is needed is *demoted*: its content is copied here, unless
  it is here already.
- A prefix that is found here is *promoted*: its blocks are copied into free blocks of the pool,
  where the ordinary lookup finds them from then on.

Within a step the worker copies out first, then within the pool, then in, and only then computes.
Copying out comes first because the blocks of the pool that are read there get new holders in the
same step, which write to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from quire.core.block_hash import parent_key
from quire.core.kv.block import KVBlock
from quire.core.kv.hits import GroupBlocks, find_hits
from quire.core.kv.holding import Holding
from quire.core.kv.pool import BlockPool
from quire.core.kv.tables import BlockTables
from quire.core.kv.tier import HostTier, Key
from quire.core.request import Request
from quire.utils.math import cdiv

Move = tuple[int, int]
"""(from, to): block ids, of the pool or of the tier as the direction says."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """What a swapped-out request comes back to."""

    num_computed_tokens: int
    num_unseen: list[int]
    tables: list[list[int]]
    """Its blocks of the tier, for each group; those at the head that no token sees are left out."""

    @property
    def blocks(self) -> list[int]:
        """Of all groups."""
        return [block for table in self.tables for block in table]


class _Parked(KVBlock):
    """Stands in a list of hits for a block that is only in the tier, and has the id of that."""

    __slots__ = ()


class _BothTiers:
    """Looks blocks up in the pool, then in the tier."""

    def __init__(self, pool: BlockPool, tier: HostTier) -> None:
        self._pool = pool
        self._tier = tier
        self.null_block = pool.null_block

    def get_cached_block(self, block_hash: bytes, group: int = 0) -> KVBlock | None:
        """See `BlockPool`."""
        block = self._pool.get_cached_block(block_hash, group)
        if block is None and (parked := self._tier.find((group, block_hash))) is not None:
            return _Parked(parked)
        return block

    def find_run(self, hashes: Iterable[bytes], group: int = 0) -> list[KVBlock]:
        """See `BlockPool`."""
        run: list[KVBlock] = []
        for block_hash in hashes:
            block = self.get_cached_block(block_hash, group)
            if block is None:
                break
            run.append(block)
        return run


class SwapSpace:
    """The second tier of one KV cache.

    Args:
        tables: What requests hold; they and their pool are changed from here, too.
        num_blocks: Blocks of the tier.
    """

    def __init__(self, tables: BlockTables, num_blocks: int) -> None:
        self._tables = tables
        self._pool = tables.pool
        self._tier = HostTier(num_blocks)
        self._both = _BothTiers(self._pool, self._tier)
        self._swapped: dict[str, Swapped] = {}
        self._out: list[Move] = []
        self._in: dict[int, int] = {}
        # by the block of the pool that is written, the block of the tier that is read
        self._moving: list[int] = []
        # blocks of the tier that are pinned until the step that reads or writes them is over
        self.is_closed = False
        """Set after a failed write: nothing more is copied out, but what is here can come back."""

    # ---- facts -------------------------------------------------------------------------------

    @property
    def num_swapped(self) -> int:
        """Requests that are swapped out."""
        return len(self._swapped)

    @property
    def swapped_ids(self) -> Set[str]:
        """Their ids."""
        return self._swapped.keys()

    @property
    def usage(self) -> float:
        """Share of the tier that is pinned, 0 to 1."""
        return self._tier.num_pinned / self._tier.num_blocks

    def num_tokens_of(self, request_id: str) -> int:
        """Computed tokens that a swapped-out request comes back to; 0 if it is not here."""
        swapped = self._swapped.get(request_id)
        return swapped.num_computed_tokens if swapped else 0

    # ---- steps -------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """The step before is over: its copies are done, and their pins can go."""
        self._tier.unpin(self._moving)
        self._moving = []

    def mark(self) -> dict[str, Swapped]:
        """What is kept for requests, for `undo`."""
        self._tier.mark()
        return self._swapped.copy()

    def still_kept(self, swapped: Mapping[str, Swapped]) -> dict[str, Swapped]:
        """Of what was kept for requests once, what has been there ever since. Does not forget
        which blocks were taken since `mark`."""
        return {i: place for i, place in swapped.items() if self._swapped.get(i) is place}

    def undo(self, swapped: dict[str, Swapped]) -> None:
        """Take back what happened since `mark`. Blocks of the tier that were taken since then may
        hold anything.

        Args:
            swapped: From `mark`, of the requests that still come back.
        """
        self._swapped = swapped.copy()
        self._out, self._in, self._moving = [], {}, []
        self._tier.undo(Counter(b for place in swapped.values() for b in place.blocks))

    def take_moves(self) -> tuple[list[Move], list[Move]]:
        """The copies of this step: (pool to tier, tier to pool)."""
        out, into = self._out, [(parked, block_id) for block_id, parked in self._in.items()]
        self._out, self._in = [], {}
        return out, into

    # ---- out ---------------------------------------------------------------------------------

    def demote(self, block: KVBlock) -> None:
        """Have the content of a cached block copied out, if there is room: the pool is about to
        reuse it."""
        origin = block.origin
        if block.block_hash is None or origin is None or self.is_closed:
            return
        if origin.ready_at > self._pool.step:
            return  # its content was registered for this step, which has not computed it yet
        key = (origin.group, block.block_hash)
        if self._tier.find(key) is not None:
            return
        parked = self._tier.take(key)
        if parked is not None:
            self._out.append((block.block_id, parked))
            self._moving.append(parked)

    def swap_out(self, request: Request) -> bool:
        """Have all that a request has computed copied out. The caller frees its blocks of the pool.

        Returns:
            False, and nothing has happened, if there is no room or nothing to keep.
        """
        held = self._tables.held.get(request.request_id)
        if held is None or self.is_closed or not request.num_computed_tokens:
            return False
        out: list[Move] = []
        tables: list[list[int]] = []
        size = self._tables.block_size
        for group, table in enumerate(held.tables):
            seen = table[held.num_unseen[group] : cdiv(request.num_computed_tokens, size)]
            tables.append([])
            for block in seen:
                parked = self._park(block, group, out)
                if parked is None:
                    self._give_up(tables, out)
                    return False
                tables[-1].append(parked)
        self._out += out
        self._swapped[request.request_id] = Swapped(
            request.num_computed_tokens, list(held.num_unseen), tables
        )
        return True

    def _park(self, block: KVBlock, group: int, out: list[Move]) -> int | None:
        """Pin the block of the tier that has a block's content, or is to get it; None if there is
        no room."""
        key: Key | None = (group, block.block_hash) if block.block_hash is not None else None
        parked = self._tier.find(key) if key is not None else None
        if parked is not None:
            self._tier.pin(parked)
            return parked
        parked = self._tier.take(key)
        if parked is not None:
            out.append((block.block_id, parked))
        return parked

    def _give_up(self, tables: list[list[int]], out: list[Move]) -> None:
        # Nothing was written to the blocks of `out`, so nothing must be found in them. The others
        # had the content before, and keep it.
        self._tier.forget_blocks(parked for _, parked in out)
        for table in tables:
            self._tier.unpin(table)

    # ---- in ----------------------------------------------------------------------------------

    def stay_out(self, taken: list[KVBlock]) -> None:
        """Blocks of the pool have a new holder: cancel what was to be copied into them this step.

        It was meant for a request that has lost them again since, and would be written over
        whatever the new holder has there.
        """
        if self._in:
            for block in taken:
                self._in.pop(block.block_id, None)

    def swap_in(self, request: Request) -> None:
        """Give a swapped-out request blocks of the pool again, and have its content copied into
        them; there must be room."""
        swapped = self._swapped.pop(request.request_id)
        held = Holding(len(swapped.tables))
        held.num_unseen = list(swapped.num_unseen)
        for group, parked in enumerate(swapped.tables):
            blocks = self._pool.get_new_blocks(len(parked))
            held.tables[group].extend([self._pool.null_block] * held.num_unseen[group])
            held.tables[group].extend(blocks)
            self._in |= {b.block_id: p for p, b in zip(parked, blocks, strict=True)}
        self._moving += swapped.blocks
        self._tables.hold(request.request_id, held)
        request.num_computed_tokens = swapped.num_computed_tokens

    def promote(self, request: Request, hits: GroupBlocks) -> tuple[GroupBlocks, int]:
        """Bring in what the tier adds to a prefix that was found in the pool, if the whole request
        has room there.

        Args:
            request: One that `get_computed_blocks` was asked for.
            hits: What it answered.

        Returns:
            The hits, the new ones among them, and how many of their places were filled from the
            tier. As before, they are not held.
        """
        size = self._tables.block_size
        limit = request.num_readable_tokens // size
        hashes = request.block_hashes[:limit]
        windows = self._tables.windows
        found = find_hits(self._both, windows, hashes, size) if hits else ()
        if not found or len(found[0]) <= len(hits[0]):
            return hits, 0
        if self._tables.lacking_blocks(request.num_tokens, hits) > 0:
            return hits, 0
        places = zip(*found, strict=True)
        promoted = sum(any(isinstance(b, _Parked) for b in place) for place in places)
        for blocks in found:
            for block in blocks:
                # Hold all that is needed before any block is taken: taking one evicts its content,
                # and demoting that could reuse the very block of the tier that is to be read.
                if isinstance(block, _Parked):
                    self._tier.pin(block.block_id)
                    self._moving.append(block.block_id)
                else:
                    self._pool.touch([block])
        for group, blocks in enumerate(found):
            self._bring_in(request, group, blocks)
        for blocks in found:
            self._pool.free_blocks(reversed(blocks))
        return found, promoted

    def _bring_in(self, request: Request, group: int, blocks: list[KVBlock]) -> None:
        """Replace the parked blocks of a list of hits by blocks of the pool, and register those
        under the content that is copied into them."""
        size = self._tables.block_size
        for index, block in enumerate(blocks):
            if isinstance(block, _Parked):
                [own] = self._pool.get_new_blocks(1)
                self._in[own.block_id] = block.block_id
                self._pool.cache(
                    [own],
                    [request.block_hashes[index]],
                    parent_key(request, index),
                    request.all_token_ids,
                    [(index * size, (index + 1) * size)],
                    group,
                )
                blocks[index] = own

    # ---- ends --------------------------------------------------------------------------------

    def drop(self, request_id: str) -> None:
        """Let go of what is kept for a request, which has ended or will be computed again."""
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            self._tier.unpin(swapped.blocks)

    def forget(self, key: Key) -> None:
        """Forget content that cannot be trusted any more."""
        self._tier.forget(key)

    def clear(self) -> None:
        """Forget all content that is not pinned."""
        self._tier.clear()

    def lose(self, parked: list[int]) -> None:
        """Blocks of the tier could not be written: forget them, and write nothing more."""
        self.is_closed = True
        self.forget_blocks(parked)

    def forget_blocks(self, parked: list[int]) -> None:
        """Forget blocks of the tier whose content is lost. Requests that were swapped out to them
        are computed again."""
        self._tier.forget_blocks(parked)
        lost = set(parked)
        losers = [i for i, s in self._swapped.items() if not lost.isdisjoint(s.blocks)]
        for request_id in losers:
            self.drop(request_id)

    def check_integrity(self) -> None:
        """Check that every pin has its reason, and every swapped-out request all its blocks.

        Raises:
            AssertionError: naming what is wrong.
        """
        pins, size = Counter(self._moving), self._tables.block_size
        for request_id, swapped in self._swapped.items():
            length = cdiv(swapped.num_computed_tokens, size)
            for unseen, table in zip(swapped.num_unseen, swapped.tables, strict=True):
                kept = unseen + len(table)
                assert kept == length, f"{request_id}: {kept} blocks for {length} in the tier"
            pins.update(swapped.blocks)
        self._tier.check_integrity(dict(pins))
