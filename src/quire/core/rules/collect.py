"""Facts about the step that was just applied, gathered from the books, the batch and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.core.batch import BatchResult, ScheduledBatch
from quire.core.books import Books
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats


def collect_stats(
    books: Books,
    batch: ScheduledBatch,
    result: BatchResult,
    outputs: list[EngineCoreOutput],
) -> StepStats:
    """Facts about the step just applied, and the records that belong to it."""
    pool, before = books.kv.block_pool, books.pool_counts
    books.pool_counts = (
        pool.num_allocated, pool.num_freed, pool.num_evicted, pool.num_missed,
    )  # fmt: skip
    allocated, freed, evicted, missed = (
        now - then for now, then in zip(books.pool_counts, before, strict=True)
    )
    facts, names = books.take_records()
    drafts, sampled = batch.scheduled_spec_tokens, result.sampled_token_ids
    swap = books.kv.swap
    return StepStats(
        step=batch.step,
        start=books.facts.started,
        num_running=len(books.running),
        num_waiting=len(books.waiting) + len(books.compiling),
        num_compiling=len(books.compiling),
        num_swapped=swap.num_swapped if swap else 0,
        swap_usage=swap.usage if swap else 0.0,
        kv_cache_usage=books.kv.usage,
        num_prompt_tokens=batch.num_prompt_tokens,
        num_generation_tokens=sum([len(o.new_token_ids) for o in outputs]),
        num_scheduled_tokens=batch.total_num_scheduled_tokens,
        num_scheduled_requests=len(batch.num_scheduled_tokens),
        num_prefills=batch.num_prefills,
        num_preempted=len(batch.preempted_req_ids),
        prefix_queries=batch.prefix_queries,
        prefix_hits=batch.prefix_hits,
        prefix_lookups=batch.prefix_lookups,
        num_draft_tokens=sum(map(len, drafts.values())),
        num_accepted_tokens=sum(len(sampled[i]) - 1 for i in drafts if i in sampled),
        num_accepted_per_pos=_accepted_per_pos(drafts, sampled) if drafts else [],
        num_drafts=len(drafts),
        num_blocks_allocated=allocated,
        num_blocks_freed=freed,
        num_blocks_evicted=evicted,
        prefix_missed=missed * books.kv.block_size,
        num_blocks_swapped_out=len(batch.swap_out),
        num_blocks_swapped_in=len(batch.swap_in),
        num_swap_failures=len(result.unwritten) + len(result.unread),
        forward_seconds=result.forward_seconds,
        sample_seconds=result.sample_seconds,
        facts=facts,
        names=names,
        stays=books.kv.take_stays(),
        swap_seconds=result.swap_seconds,
        worker_start=result.worker_start,
        worker_seconds=result.worker_seconds,
        layer_times=result.layer_times,
    )


def _accepted_per_pos(
    drafts: Mapping[str, Sequence[int]], sampled: Mapping[str, Sequence[int]]
) -> list[int]:
    """How many drafts had their token confirmed at each position."""
    counts = [0] * max(map(len, drafts.values()))
    for request_id in drafts:
        for position in range(len(sampled.get(request_id, ())) - 1):
            counts[position] += 1
    return counts
