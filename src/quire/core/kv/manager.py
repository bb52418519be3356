"""What the scheduler may ask of the KV cache: look up a prefix, allocate slots, free.

It decides which blocks a request takes, finds again and gives back; the block tables keep which
request holds which. It moves no data: the worker reads the tables from the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain, islice
from typing import NamedTuple

from quire.config.kv_groups import num_unseen_blocks
from quire.core.batch import BlockIds
from quire.core.block_hash import extend_block_hashes, parent_key
from quire.core.kv.answer import PrefixAnswer
from quire.core.kv.block import KVBlock
from quire.core.kv.hits import GroupBlocks, find_hits
from quire.core.kv.holding import Holding
from quire.core.kv.pool import BlockPool
from quire.core.kv.residency import BlockResidency, Stay
from quire.core.kv.swap import Swapped, SwapSpace
from quire.core.kv.tables import BlockTables, ids_from, num_positions
from quire.core.request import Request
from quire.logger import get_logger
from quire.utils.math import cdiv

logger = get_logger(__name__)

MIN_COPIED_TOKENS = 4
"""Fewer tokens than this are computed rather than copied: that takes no longer."""


class PrefixMatch(NamedTuple):
    """The part of a waiting request that need not be computed."""

    hits: GroupBlocks
    """Whole blocks that were found."""
    num_hit: int
    """The tokens in `hits`, or those that a swapped-out request comes back to."""
    sources: list[KVBlock]
    """In each group, the block whose beginning is to be copied; empty: nothing is copied."""
    num_copied: int
    """Tokens to copy."""
    is_swapped: bool = False
    num_promoted: int = 0
    """Tokens of `hits` that were only in the second tier."""

    @property
    def num_tokens(self) -> int:
        """All tokens that need not be computed."""
        return self.num_hit + self.num_copied


class KVCacheManager:
    """The KV cache, in block ids.

    Args:
        num_blocks: Blocks of the pool, the null block included.
        block_size: Tokens per block.
        enable_caching: Prefix reuse on or off.
        max_model_len: Longest request; caps what is reserved ahead.
        windows: Of each group of layers, the positions a token sees; `None`: all before it.
        max_chunk_tokens: Slots that one step takes for a request at most, for drafts to come
            too. Room in groups with a window is reckoned with it.
        num_swap_blocks: Blocks of the second tier; 0: there is none.
        residency: Follows how long cached content stays, if that is wanted.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        enable_caching: bool = True,
        max_model_len: int = 2**31,
        windows: Sequence[int | None] = (None,),
        max_chunk_tokens: int = 2**31,
        num_swap_blocks: int = 0,
        residency: BlockResidency | None = None,
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.block_pool = BlockPool(num_blocks, enable_caching, len(windows))
        self.block_pool.residency = residency
        self.tables = BlockTables(
            self.block_pool, block_size, windows, max_model_len, max_chunk_tokens
        )
        """What each request holds."""
        self.windows = self.tables.windows
        self.max_chunk_tokens = self.tables.max_chunk_tokens
        self._spans: list[tuple[int, int]] = []
        # of full blocks, by their place: made once for all requests
        self.swap: SwapSpace | None = None
        """The second tier, if there is one."""
        if num_swap_blocks:
            self.swap = SwapSpace(self.tables, num_swap_blocks)
            self.block_pool.on_evict = self.swap.demote
            self.block_pool.on_take = self.swap.stay_out

    @property
    def usage(self) -> float:
        """Share of blocks held by requests, 0 to 1."""
        return self.block_pool.usage

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest request that the whole pool can hold, in whole blocks."""
        return self.tables.capacity_tokens

    def get_block_ids(self, request_id: str) -> BlockIds:
        """Block tables of a request, one per group; empty if it holds none."""
        return self.tables.ids_of(request_id)

    def num_blocks_of(self, request_id: str) -> int:
        """How many blocks a request holds."""
        return self.tables.num_blocks_of(request_id)

    def num_slots_of(self, request_id: str) -> int:
        """For how many tokens a request has room."""
        return self.tables.num_slots_of(request_id)

    def num_blocks_in(self, hits: GroupBlocks) -> int:
        """How many blocks a prefix hit has in all groups together."""
        return self.tables.num_blocks_in(hits)

    def lacking_blocks(self, num_tokens: int, hits: GroupBlocks) -> int:
        """See `BlockTables.lacking_blocks`."""
        return self.tables.lacking_blocks(num_tokens, hits)

    def find_prefix(self, request: Request) -> PrefixMatch:
        """The part of a waiting request that need not be computed: its own KV in the second tier,
        or what the prefix cache has.

        Content of the second tier is brought into the pool if there is room. The request holds
        none of the blocks yet.
        """
        swap = self.swap
        if swap is not None and (kept := swap.num_tokens_of(request.request_id)):
            return PrefixMatch((), kept, [], 0, is_swapped=True)
        hits, num_hit = self.get_computed_blocks(request)
        promoted = 0
        if swap is not None and hits:
            hits, promoted = swap.promote(request, hits)
            num_hit = len(hits[0]) * self.block_size
        sources, copied = self.find_partial_block(request, num_hit)
        return PrefixMatch(hits, num_hit, sources, copied, num_promoted=promoted * self.block_size)

    def admit(
        self,
        request: Request,
        prefix: PrefixMatch,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
    ) -> tuple[BlockIds, list[tuple[int, int, int]]]:
        """Give a waiting request its blocks; there must be room.

        Args:
            request: It waits.
            prefix: From `find_prefix`, and nothing was allocated since.
            num_new_tokens: Tokens to be computed after those of the prefix.
            num_lookahead_tokens: Slots wanted beyond, for drafts to come.

        Returns:
            Its block tables, and the copies to make, for `ScheduledBatch.block_copies`.
        """
        if not request.num_preemptions:
            # Count what a larger pool would have found. A request that comes back does not count:
            # what it misses is what its own preemption has evicted.
            first, end = prefix.num_hit // self.block_size, self._num_hashes(request)
            missing = islice(request.block_hashes, first, end)
            self.block_pool.num_missed += self.block_pool.evicted.count_run(missing)
        if prefix.is_swapped:
            assert self.swap is not None, "it came from there"
            self.swap.swap_in(request)
        ids = self.allocate_slots(
            request, num_new_tokens, prefix.hits, prefix.num_copied, num_lookahead_tokens
        )
        assert ids is not None, "there is room"
        if prefix.is_swapped:
            ids = self.get_block_ids(request.request_id)
        if not prefix.sources:
            return ids, []
        return ids, self.copies_into(request, prefix.sources, prefix.num_hit, prefix.num_copied)

    def get_computed_blocks(self, request: Request) -> tuple[GroupBlocks, int]:
        """The longest cached prefix: its blocks in each group, and its length in tokens.

        At most `num_readable_tokens`, because the last one must be computed to get logits: an
        aligned prompt that is wholly cached recomputes its last block. The blocks are not held
        yet; nothing changes.
        """
        if not self.enable_caching or not request.sampling_params.reads_prefix_cache:
            return (), 0
        extend_block_hashes(request, self.block_size)
        hashes = request.block_hashes[: self._num_hashes(request)]
        hits = find_hits(self.block_pool, self.windows, hashes, self.block_size)
        return hits, len(hits[0]) * self.block_size

    def _num_hashes(self, request: Request) -> int:
        """How many blocks of a request may be hit: its last token must be computed in any case."""
        return request.num_readable_tokens // self.block_size

    def find_partial_block(self, request: Request, num_hit: int) -> tuple[list[KVBlock], int]:
        """The cached block, in each group, that shares most tokens with the block after the hit,
        and how many all of them share.

        Those tokens can be copied into the request's own next blocks instead of being computed.
        In all, at most `num_readable_tokens` of a request are hit or copied.

        Args:
            request: One that `get_computed_blocks` was asked for.
            num_hit: Tokens in whole blocks that were found.
        """
        if not self.enable_caching or not request.sampling_params.reads_prefix_cache:
            return [], 0
        end = min(num_hit + self.block_size, request.num_readable_tokens)
        key = parent_key(request, num_hit // self.block_size)
        blocks: list[KVBlock] = []
        for group in range(len(self.windows)):
            if end - num_hit < MIN_COPIED_TOKENS:
                break
            tokens = request.all_token_ids[num_hit:end]
            block, count = self.block_pool.find_beginning(key, tokens, group)
            end = num_hit + count
            if block is not None:
                blocks.append(block)
        return (blocks, end - num_hit) if end - num_hit >= MIN_COPIED_TOKENS else ([], 0)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: GroupBlocks = (),
        num_copied_tokens: int = 0,
        num_lookahead_tokens: int = 0,
    ) -> BlockIds | None:
        """Make room for the next `num_new_tokens` of a request, and register the blocks they fill.

        Blocks that fell out of the windows are given back first, even if there is still no room.
        Need not be called while computed plus new tokens stay within `request.num_quiet_tokens`.

        Args:
            request: With `num_computed_tokens` as before this step; for a request that comes in
                with a prefix hit it does not yet include the hit.
            num_new_tokens: Tokens to be computed after computed and hit tokens.
            new_computed_blocks: Blocks of the prefix hit, from `get_computed_blocks`.
            num_copied_tokens: Tokens after those, from `find_partial_block`.
            num_lookahead_tokens: Slots wanted beyond, for drafts to come.

        Returns:
            Ids of the blocks appended to each of the request's tables (hit blocks first); `()` if
            there was room already; None when too few are free.
        """
        held = self.tables.held.get(request.request_id)
        if held is None:
            held = Holding(len(self.windows))
        elif self.tables.windowed:
            self._free_unseen(request, held)
        num_hit = num_positions(new_computed_blocks)
        hit_tokens = num_hit * self.block_size + num_copied_tokens
        total = request.num_computed_tokens + hit_tokens + num_new_tokens
        num_slots = min(total + num_lookahead_tokens, self.tables.max_model_len)
        num_new = max(0, cdiv(num_slots, self.block_size) - len(held) - num_hit)
        # Hit blocks that nobody holds still count as free, but will not be once they are touched.
        num_revived = self.block_pool.count_free(new_computed_blocks)
        if num_new * len(self.windows) + num_revived > self.block_pool.get_num_free_blocks():
            return None
        start = len(held)
        if num_hit:
            self._take_hits(held, new_computed_blocks)
        if num_new:
            for table in held.tables:
                table += self.block_pool.get_new_blocks(num_new)
        self.tables.held[request.request_id] = held
        if self.enable_caching:
            self._cache_full_blocks(request, held, min(total, request.num_tokens))
        request.num_quiet_tokens = self._num_quiet_tokens(held, num_lookahead_tokens)
        if logger.isEnabledFor(10):
            self._log_allocation(request, num_new_tokens, new_computed_blocks)
        return ids_from(held.tables, start) if len(held) > start else ()

    def _take_hits(self, held: Holding, hits: GroupBlocks) -> None:
        for group, (table, blocks) in enumerate(zip(held.tables, hits, strict=True)):
            self.block_pool.touch(blocks)
            table += blocks
            if self.block_pool.residency is not None:
                self.block_pool.residency.found(blocks)
            if self.windows[group] is not None:
                held.num_unseen[group] = sum(block.is_null for block in blocks)
        held.num_cached = len(held)

    def _free_unseen(self, request: Request, held: Holding) -> None:
        """Give back the blocks that no token of the request will see again."""
        computed, size = request.num_computed_tokens, self.block_size
        for group, window in self.tables.windowed:
            first, end = held.num_unseen[group], num_unseen_blocks(window, computed, size)
            if end > first:
                table = held.tables[group]
                self.block_pool.free_blocks(table[first:end][::-1])
                table[first:end] = [self.block_pool.null_block] * (end - first)
                held.num_unseen[group] = end

    def _num_quiet_tokens(self, held: Holding, num_lookahead: int) -> int:
        """Up to how many computed tokens nothing is to be done for a request; see
        `Request.num_quiet_tokens`."""
        # Up to here it has slots.
        quiet = len(held) * self.block_size - num_lookahead
        if self.enable_caching:
            # One token more fills the next block, which must be registered then.
            quiet = min(quiet, (held.num_cached + 1) * self.block_size - 1)
        for group, window in self.tables.windowed:
            # One more computed token than this, and a block is out of sight.
            quiet = min(quiet, (held.num_unseen[group] + 1) * self.block_size + window - 1)
        return quiet

    def copies_into(
        self, request: Request, sources: Sequence[KVBlock], num_hit: int, count: int
    ) -> list[tuple[int, int, int]]:
        """The copies that `find_partial_block` suggested, for `ScheduledBatch.block_copies`.

        Args:
            request: It has got its blocks.
            sources: From `find_partial_block`.
            num_hit: Tokens in whole blocks that were found.
            count: Tokens to copy.
        """
        index = num_hit // self.block_size
        tables = self.tables.held[request.request_id].tables
        own = [table[index].block_id for table in tables]
        return [(b.block_id, o, count) for b, o in zip(sources, own, strict=True)]

    def free(self, request: Request, keep_tail: bool = True) -> None:
        """Give back all blocks of a request, its tail first, so that the tail is evicted before
        the head, which more requests may share.

        Args:
            request: Its `num_computed_tokens` tells how far its KV goes.
            keep_tail: Whether others may copy the beginning of its last, partly filled block.
        """
        request.num_quiet_tokens = 0
        held = self.tables.held.pop(request.request_id, None)
        if held is None:
            return
        if keep_tail and self.enable_caching:
            self._cache_tail(request, held)
        self.block_pool.free_blocks(held.from_tail())

    def _cache_tail(self, request: Request, held: Holding) -> None:
        index, count = divmod(request.num_computed_tokens, self.block_size)
        if count < MIN_COPIED_TOKENS or index >= len(held) or index > len(request.block_hashes):
            return
        span = (index * self.block_size, request.num_computed_tokens)
        parent = parent_key(request, index)
        for group, table in enumerate(held.tables):
            self.block_pool.cache_tail(table[index], parent, request.all_token_ids, span, group)

    def uncache_from(self, request: Request, num_tokens: int) -> list[int]:
        """Make the blocks after the first `num_tokens` of a request unfindable.

        Needed when tokens that were registered ahead of a step are not computed after all. The
        request no longer holds blocks that fell out of a window since then; they are looked up by
        their hash.

        Returns:
            Ids of those blocks: other requests that already hold them cannot trust them either.
        """
        held = self.tables.held.get(request.request_id)
        if held is None:
            return []
        first, pool = num_tokens // self.block_size, self.block_pool
        suspect: list[KVBlock] = []
        for group, table in enumerate(held.tables):
            for block_hash in request.block_hashes[first : held.num_unseen[group]]:
                suspect += pool.uncache_all(block_hash, group)
                if self.swap is not None:
                    self.swap.forget((group, block_hash))
            suspect += table[max(first, held.num_unseen[group]) :]
        for block in suspect:
            if self.swap is not None and block.origin and block.block_hash:
                self.swap.forget((block.origin.group, block.block_hash))
            pool.uncache(block)
        return [block.block_id for block in suspect]

    def uncache_ids(self, block_ids: Iterable[int]) -> set[int]:
        """Make blocks unfindable that do not hold what they should.

        Returns:
            Their ids.
        """
        suspect = set(block_ids)
        for block_id in suspect:
            self.block_pool.uncache(self.block_pool.blocks[block_id])
        return suspect

    def begin_step(self) -> None:
        """What was allocated before is computed by now; what follows belongs to the next step."""
        self.block_pool.step += 1
        if self.swap is not None:
            self.swap.begin_step()

    def undo(self, step: int, swapped: dict[str, Swapped]) -> None:
        """Take back what happened since a step: no request holds anything, and only what was
        computed by then can be found.

        Args:
            step: `block_pool.step` at that time.
            swapped: From `SwapSpace.mark` at that time, of those still wanted.
        """
        self.tables.held = {}
        self.block_pool.undo(step)
        if self.swap is not None:
            self.swap.undo(swapped)

    def forget_all(self) -> None:
        """No request holds anything, and nothing can be found, here or in the second tier. What the
        books say is not relied on."""
        self.tables.held = {}
        self.block_pool.forget_all()
        if self.swap is not None:
            self.swap.undo({})
            self.swap.clear()

    def explain_prefix(self, request: Request) -> PrefixAnswer:
        """Why a request would, or would not, find its prefix: how far the cache follows it, and
        the token at which the nearest cached content differs. To be asked between steps."""
        self.begin_step()  # what the last one registered is computed by now
        extend_block_hashes(request, self.block_size)
        num_hit = self.get_computed_blocks(request)[1]
        rest = request.all_token_ids[num_hit:]
        key = parent_key(request, num_hit // self.block_size)
        nearest, shared = self.block_pool.find_beginning(key, rest[: self.block_size])
        parts = nearest is not None and shared < min(len(nearest.token_ids), len(rest))
        return PrefixAnswer(
            num_tokens=request.num_tokens,
            num_cached_tokens=num_hit + self.find_partial_block(request, num_hit)[1],
            block_index=num_hit // self.block_size,
            first_difference=num_hit + shared if parts else None,
            cached_token_id=nearest.token_ids[shared] if nearest and parts else None,
            given_token_id=rest[shared] if parts else None,
        )

    def take_stays(self) -> list[Stay]:
        """How long the cached content stayed that was evicted since the last call; empty unless
        residency is followed."""
        residency = self.block_pool.residency
        return [] if residency is None else residency.take()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; refused (False) while requests hold blocks."""
        done = self.block_pool.reset_prefix_cache()
        if done and self.swap is not None:
            self.swap.clear()
        return done

    def check_integrity(self) -> None:
        """Check pool and tables against each other.

        Raises:
            AssertionError: naming what is wrong.
        """
        for _ in self.integrity_parts():
            pass

    def integrity_parts(self) -> Iterator[None]:
        """`check_integrity` part by part: blocks may change between two."""
        if self.swap is not None:
            self.swap.check_integrity()
            yield
        yield from self.tables.integrity_parts()

    def check_holders(self, running: Set[str], waiting: Set[str]) -> None:
        """Check that nothing is kept for anybody else.

        Args:
            running: Ids of the requests that hold blocks.
            waiting: Those that may be swapped out.

        Raises:
            AssertionError: naming for whom.
        """
        strangers = self.tables.held.keys() - running
        assert not strangers, f"blocks are held for {sorted(strangers)}, who do not run"
        if self.swap is not None:
            gone = self.swap.swapped_ids - waiting
            assert not gone, f"{sorted(gone)} are swapped out and do not wait"

    def check_blocks_of(self, request: Request) -> None:
        """Check that a running request's blocks are found by its own tokens, as far as they are
        found at all.

        Raises:
            AssertionError: naming the block that is wrong.
        """
        held, size = self.tables.held[request.request_id], self.block_size
        cached = held.num_cached
        assert cached * size <= request.num_computed_tokens, f"{request} has {cached} full blocks"
        num_hashes = len(request.block_hashes)
        assert num_hashes <= request.num_tokens // size, f"{request} has {num_hashes} hashes"
        for table in held.tables:
            for index, block in enumerate(table):
                if block.is_null or block.origin is None:
                    continue
                assert index < cached, f"{request}: {block} is not full"
                own = request.block_hashes[index], (index * size, (index + 1) * size)
                assert (block.block_hash, block.span) == own, f"{request} holds another's {block}"

    def _cache_full_blocks(self, request: Request, held: Holding, num_tokens: int) -> None:
        """Register the blocks that will be full after this step before it runs, so that requests
        admitted later in the same step can already share them."""
        size, done = self.block_size, held.num_cached
        full = num_tokens // size
        if full <= done:
            return
        extend_block_hashes(request, size)
        hashes, parent = request.block_hashes[done:full], parent_key(request, done)
        while len(self._spans) < full:
            self._spans.append((len(self._spans) * size, (len(self._spans) + 1) * size))
        spans = self._spans[done:full]
        for group, table in enumerate(held.tables):
            self.block_pool.cache(
                table[done:full], hashes, parent, request.all_token_ids, spans, group
            )
        held.num_cached = full

    def _log_allocation(self, request: Request, num_new_tokens: int, hits: GroupBlocks) -> None:
        for block in chain.from_iterable(hits):
            mark = block.block_hash.hex()[:16] if block.block_hash else ""
            logger.debug("[CACHE HIT] hash=%s block_id=%d", mark, block.block_id)
        logger.debug(
            "[KV] req=%s new_tokens=%d block_table_len=%d free_blocks=%d",
            request.request_id,
            num_new_tokens,
            len(self.tables.held[request.request_id]),
            self.block_pool.get_num_free_blocks(),
        )
