"""What the scheduler may ask of the KV cache: look up a prefix, allocate slots, free.

It owns one block table per request. It moves no data: the worker reads the tables from the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.block_hash import extend_block_hashes, parent_key
from quire.core.kv.block import KVBlock
from quire.core.kv.pool import BlockPool
from quire.core.request import Request
from quire.logger import get_logger
from quire.utils.math import cdiv

logger = get_logger(__name__)

MIN_COPIED_TOKENS = 4
"""Fewer tokens are computed again: copying them takes as long."""


@dataclass(frozen=True, slots=True)
class PrefixAnswer:
    """How far the prefix cache follows a prompt, and where and why it stops."""

    num_tokens: int
    num_cached_tokens: int
    """Tokens that need not be computed; at most `num_tokens - 1`."""
    block_index: int
    """The first block that is not found whole."""
    first_difference: int | None
    """Position of the first token that differs from the nearest cached content in that block;
    None if nothing cached begins alike there, or nothing differs as far as it goes."""
    cached_token_id: int | None
    given_token_id: int | None


class KVCacheManager:
    """Block tables over one pool.

    Args:
        num_blocks: Blocks of the pool, the null block included.
        block_size: Tokens per block.
        enable_caching: Prefix reuse on or off.
        max_model_len: Longest request; caps what is reserved ahead.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        enable_caching: bool = True,
        max_model_len: int = 2**31,
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.max_model_len = max_model_len
        self.block_pool = BlockPool(num_blocks, enable_caching)
        self._tables: dict[str, list[KVBlock]] = {}
        self._num_cached: dict[str, int] = {}
        # blocks at the head of a table whose hash is already registered

    @property
    def usage(self) -> float:
        """Share of blocks held by requests, 0 to 1."""
        return self.block_pool.usage

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the whole pool."""
        return (self.block_pool.num_blocks - 1) * self.block_size

    def get_block_ids(self, request_id: str) -> list[int]:
        """Block table of a request; empty if it holds none."""
        return [b.block_id for b in self._tables.get(request_id, ())]

    def num_blocks_of(self, request_id: str) -> int:
        """How many blocks a request holds."""
        return len(self._tables.get(request_id, ()))

    def get_computed_blocks(self, request: Request) -> tuple[list[KVBlock], int]:
        """The longest cached prefix: its blocks and its length in tokens.

        At most `num_tokens - 1` tokens, because the last one must be computed to get logits: an
        aligned prompt that is wholly cached recomputes its last block. The blocks are not held
        yet; nothing changes.
        """
        if not self.enable_caching or not request.sampling_params.reads_prefix_cache:
            return [], 0
        extend_block_hashes(request, self.block_size)
        limit = (request.num_tokens - 1) // self.block_size
        found: list[KVBlock] = []
        for block_hash in request.block_hashes[:limit]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            found.append(block)
        return found, len(found) * self.block_size

    def find_partial_block(self, request: Request, num_hit: int) -> tuple[KVBlock | None, int]:
        """Where the longest match ends inside a block: that block, and how many of its tokens.

        They can be copied into the request's own next block instead of being computed. At most
        `num_tokens - 1` tokens of a request are matched in all.

        Args:
            request: One that `get_computed_blocks` was asked for.
            num_hit: Tokens in whole blocks that were found.
        """
        if not self.enable_caching or not request.sampling_params.reads_prefix_cache:
            return None, 0
        end = min(num_hit + self.block_size, request.num_tokens - 1)
        if end - num_hit < MIN_COPIED_TOKENS:
            return None, 0
        key = parent_key(request, num_hit // self.block_size)
        block, count = self.block_pool.find_beginning(key, request.all_token_ids[num_hit:end])
        return (block, count) if count >= MIN_COPIED_TOKENS else (None, 0)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[KVBlock] = (),
        num_copied_tokens: int = 0,
        num_lookahead_tokens: int = 0,
    ) -> list[KVBlock] | None:
        """Make room for the next `num_new_tokens` of a request, and register the blocks they fill.

        Not needed while computed plus new tokens stay within `request.num_quiet_tokens`.

        Args:
            request: With `num_computed_tokens` as before this step; for a request that comes in
                with a prefix hit it does not yet include the hit.
            num_new_tokens: Tokens to be computed after computed and hit tokens.
            new_computed_blocks: Blocks of the prefix hit, from `get_computed_blocks`.
            num_copied_tokens: Tokens after those, from `find_partial_block`.
            num_lookahead_tokens: Slots wanted beyond, for drafts to come.

        Returns:
            The blocks appended to the request's table (hit blocks first), or None when too few
            are free; then nothing has changed.
        """
        table = self._tables.get(request.request_id, [])
        hit_tokens = len(new_computed_blocks) * self.block_size + num_copied_tokens
        total = request.num_computed_tokens + hit_tokens + num_new_tokens
        num_slots = min(total + num_lookahead_tokens, self.max_model_len)
        num_needed = cdiv(num_slots, self.block_size)
        num_new = max(0, num_needed - len(table) - len(new_computed_blocks))
        # Hit blocks that nobody holds still count as free, but will not be once they are touched.
        num_revived = sum(b.ref_cnt == 0 for b in new_computed_blocks)
        if num_new + num_revived > self.block_pool.get_num_free_blocks():
            return None
        appended: list[KVBlock] = []
        if new_computed_blocks:
            self.block_pool.touch(new_computed_blocks)
            appended.extend(new_computed_blocks)
            self._num_cached[request.request_id] = len(new_computed_blocks)
        if num_new:
            appended.extend(self.block_pool.get_new_blocks(num_new))
        if request.request_id not in self._tables:
            self._tables[request.request_id] = table
        table.extend(appended)
        request.num_quiet_tokens = len(table) * self.block_size - num_lookahead_tokens
        if self.enable_caching:
            full = self._cache_full_blocks(request, min(total, request.num_tokens))
            next_full = (full + 1) * self.block_size
            request.num_quiet_tokens = min(request.num_quiet_tokens, next_full - 1)
        if logger.isEnabledFor(10):
            self._log_allocation(request, num_new_tokens, new_computed_blocks)
        return appended

    def free(self, request: Request, keep_tail: bool = True) -> None:
        """Give back all blocks of a request, its tail first, so that the tail is evicted before
        the head, which more requests may share.

        Args:
            request: With `num_computed_tokens` telling how far its KV goes.
            keep_tail: Whether the beginning of its last block may be copied later.
        """
        table = self._tables.pop(request.request_id, [])
        self._num_cached.pop(request.request_id, None)
        request.num_quiet_tokens = 0
        if keep_tail and self.enable_caching:
            self._cache_tail(request, table)
        self.block_pool.free_blocks(reversed(table))

    def _cache_tail(self, request: Request, table: list[KVBlock]) -> None:
        index, count = divmod(request.num_computed_tokens, self.block_size)
        if count < MIN_COPIED_TOKENS or index >= len(table) or index > len(request.block_hashes):
            return
        span = (index * self.block_size, request.num_computed_tokens)
        parent = parent_key(request, index)
        self.block_pool.cache_tail(table[index], parent, request.all_token_ids, span)

    def uncache_from(self, request: Request, num_tokens: int) -> list[int]:
        """Make the blocks after the first `num_tokens` of a request unfindable.

        Needed when tokens that were registered ahead of a step are not computed after all.

        Returns:
            Ids of those blocks: other requests that already hold them cannot trust them either.
        """
        table = self._tables.get(request.request_id, [])
        suspect = table[num_tokens // self.block_size :]
        for block in suspect:
            self.block_pool.uncache(block)
        return [b.block_id for b in suspect]

    def begin_step(self) -> None:
        """What was allocated before is computed now; what follows belongs to the next step."""
        self.block_pool.step += 1

    def explain_prefix(self, request: Request) -> PrefixAnswer:
        """Why a request would, or would not, find its prefix: how far the cache follows it, and
        the token at which the nearest cached content parts from it. Asked between steps."""
        self.begin_step()  # what the last one registered is computed by now
        extend_block_hashes(request, self.block_size)
        blocks, num_hit = self.get_computed_blocks(request)
        rest = request.all_token_ids[num_hit:]
        key = parent_key(request, len(blocks))
        nearest, shared = self.block_pool.find_beginning(key, rest[: self.block_size])
        parts = nearest is not None and shared < min(len(nearest.token_ids), len(rest))
        return PrefixAnswer(
            num_tokens=request.num_tokens,
            num_cached_tokens=num_hit + self.find_partial_block(request, num_hit)[1],
            block_index=len(blocks),
            first_difference=num_hit + shared if parts else None,
            cached_token_id=nearest.token_ids[shared] if nearest and parts else None,
            given_token_id=rest[shared] if parts else None,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; refused (False) while requests hold blocks."""
        return self.block_pool.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Check pool and tables against each other.

        Raises:
            AssertionError: naming what is wrong.
        """
        self.block_pool.check_integrity(self._tables.values())
        assert self._num_cached.keys() <= self._tables.keys(), "cache counts outlive their tables"
        for request_id, table in self._tables.items():
            ids = [b.block_id for b in table if not b.is_null]
            assert len(ids) == len(set(ids)), f"{request_id} holds a block twice: {ids}"

    def _cache_full_blocks(self, request: Request, num_tokens: int) -> int:
        """Register the blocks that will be full after this step, before it runs: requests
        admitted later in the same step can already share them.

        Returns:
            How many blocks of the request are registered.
        """
        full = num_tokens // self.block_size
        done = self._num_cached.get(request.request_id, 0)
        if full > done:
            extend_block_hashes(request, self.block_size)
            table = self._tables[request.request_id]
            size, tokens, cache = self.block_size, request.all_token_ids, self.block_pool.cache
            parent = parent_key(request, done)
            for index in range(done, full):
                block_hash = request.block_hashes[index]
                cache(table[index], block_hash, parent, tokens, (index * size, (index + 1) * size))
                parent = block_hash
            self._num_cached[request.request_id] = done = full
        return done

    def _log_allocation(
        self, request: Request, num_new_tokens: int, hits: Sequence[KVBlock]
    ) -> None:
        for block in hits:
            mark = block.block_hash.hex()[:16] if block.block_hash else ""
            logger.debug("[CACHE HIT] hash=%s block_id=%d", mark, block.block_id)
        logger.debug(
            "[KV] req=%s new_tokens=%d block_table_len=%d free_blocks=%d",
            request.request_id,
            num_new_tokens,
            len(self._tables[request.request_id]),
            self.block_pool.get_num_free_blocks(),
        )
