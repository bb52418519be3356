"""Waiting requests come in, strictly in the order of the policy.

The first that does not fit ends the search: if smaller ones were let past it, a long prompt could
wait for ever. Why it does not fit is recorded.
"""

from __future__ import annotations

from quire.core.batch import BlockIds, ScheduledNewRequest
from quire.core.books import Books
from quire.core.facts import FactKind, Loss, Wait
from quire.core.kv.manager import PrefixMatch
from quire.core.plan import StepPlan
from quire.core.request import Request, RequestStatus
from quire.core.rules.preempt import evict
from quire.utils.math import cdiv


def admit_before_running(books: Books, plan: StepPlan) -> None:
    """Waiting requests first. Unfinished prompts keep their part of the budget, and running
    requests the blocks for their next tokens: none is preempted for a request that was just
    admitted."""
    if not books.waiting:
        return
    chunk = min(plan.chunk_limit, plan.budget)
    # A request whose next token is in flight will go on from it.
    lacking = [max(1, r.num_tokens - r.num_computed_tokens) for r in books.running]
    set_aside = min(plan.budget, sum(min(n, chunk) for n in lacking if n > 1))
    plan.budget -= set_aside
    blocks = sum(cdiv(n, books.kv.block_size) for n in lacking)
    admit_waiting(books, plan, blocks * len(books.kv.windows))
    plan.budget += set_aside


def admit_waiting(books: Books, plan: StepPlan, keep_free: int = 0) -> None:
    """Admit waiting requests in order, until one does not fit.

    Args:
        books: The books.
        plan: The step.
        keep_free: Blocks that must stay free.
    """
    waiting, config, now = books.waiting, books.config, plan.now
    if not waiting:
        return
    if books.delay_gate and books.running and not books.delay_gate.is_open():
        return say_waits(books, waiting.peek_request(now), Wait.POLICY)
    keep_free += int(config.watermark * books.kv.block_pool.num_blocks)
    while waiting:
        request = waiting.peek_request(now)
        if plan.preempted and request.request_id in plan.preempted:
            # It has just made room for a more urgent one and must not take it back.
            return say_waits(books, request, Wait.PREEMPTION)
        if plan.budget <= 0 or len(books.running) >= config.max_num_seqs:
            if _displace(books, request, 0, plan):
                continue
            return _say_no_place(books, request)
        prefix = books.kv.find_prefix(request)
        num_new = min(request.num_tokens - prefix.num_tokens, plan.chunk_limit)
        if num_new > plan.budget and not config.enable_chunked_prefill:
            return say_waits(books, request, Wait.BUDGET, num_new, plan.budget)
        num_new = min(num_new, plan.budget)
        lacking = _lacking_blocks(books, request, prefix, num_new, keep_free)
        if lacking > 0:
            if _displace(books, request, lacking, plan):
                continue
            free = books.kv.block_pool.get_num_free_blocks()
            return say_waits(books, request, Wait.BLOCKS, free + lacking, free)
        _admit(books, request, prefix, num_new, plan)


def _lacking_blocks(
    books: Books, request: Request, prefix: PrefixMatch, num_new: int, keep_free: int
) -> int:
    """Blocks that are too few to admit a request for `num_new` tokens; 0 or less: there is room."""
    whole = books.config.scheduler_reserve_full_isl
    num_tokens = request.num_tokens if whole else prefix.num_tokens + num_new
    lacking = books.kv.lacking_blocks(num_tokens + books.num_lookahead_tokens, prefix.hits)
    # If nothing runs nobody needs the blocks kept free, and waiting for more would never end.
    return lacking + keep_free if books.running else lacking


def say_waits(
    books: Books, request: Request, why: Wait, needed: int = 0, available: int = 0
) -> None:
    """Record why the head of the queue waits; see `FactKind.WAITS`."""
    books.facts.waits(request.number, why, needed, available)


def _say_no_place(books: Books, request: Request) -> None:
    limit = books.config.max_num_seqs
    if len(books.running) >= limit:
        say_waits(books, request, Wait.MAX_NUM_SEQS, len(books.running) + 1, limit)
    else:
        say_waits(books, request, Wait.BUDGET, 1, 0)


def _displace(books: Books, request: Request, lacking: int, plan: StepPlan) -> bool:
    """Preempt a running request for a waiting one, if the policy lets it and it helps.

    Args:
        books: The books.
        request: Waits and finds no room.
        lacking: Blocks it lacks; 0 if it lacks a seat or tokens of the budget.
        plan: The step.
    """
    waiting = books.waiting
    if not waiting.displaces:
        return False
    if any(new.num_computed_tokens for new in plan.admitted):
        # A request admitted this step may read blocks that a victim was to compute in this step.
        return False
    new_ids = {new.req_id for new in plan.admitted}
    candidates = [
        r
        for r in books.running
        if waiting.may_displace(request, r, plan.now) and r.request_id not in new_ids
    ]
    if plan.budget <= 0:
        # Only a victim that has tokens of this step gives any budget back.
        candidates = [r for r in candidates if r.request_id in plan.scheduled]
    held = sum(books.kv.num_blocks_of(r.request_id) for r in candidates)
    if not candidates or held < lacking:
        return False
    victim = waiting.choose_victim(candidates)
    evict(books, victim, plan, Loss.URGENCY, request)
    return True


def _admit(
    books: Books, request: Request, prefix: PrefixMatch, num_new: int, plan: StepPlan
) -> None:
    """Give a waiting request its blocks, a place in `running` and its first tokens."""
    if books.change is not None:
        books.change.admitted.append((request, request.status, request.num_tokens))
    block_ids, copies = books.kv.admit(request, prefix, num_new, books.num_lookahead_tokens)
    request.limit_quiet_tokens(prefix.num_tokens + num_new)
    plan.block_copies += copies
    books.waiting.admit_request(request)
    _record_admission(books, request, prefix, num_new, plan)
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = prefix.num_tokens
    if not prefix.is_swapped:  # else it is its own
        request.num_found_tokens = min(request.num_found_tokens, prefix.num_tokens)
    books.running.append(request)
    plan.take(request, num_new)
    plan.admitted.append(_in_full(request, block_ids, prefix.num_tokens))


def _record_admission(
    books: Books, request: Request, prefix: PrefixMatch, num_new: int, plan: StepPlan
) -> None:
    """Record what a request came in with; on its first admission also in its own statistics."""
    again, num_hit = request.status is not RequestStatus.WAITING, prefix.num_tokens
    found = books.kv.num_blocks_in(prefix.hits)
    books.facts.add(
        FactKind.ADMITTED,
        request.number,
        2 if prefix.is_swapped else int(again),
        a=num_new,
        b=num_hit,
        c=found,
        d=books.kv.num_blocks_of(request.request_id) - found,
    )
    if again:
        return
    request.scheduled_ts = plan.now
    request.num_cached_tokens = num_hit
    request.num_promoted_tokens = prefix.num_promoted
    if request.sampling_params.reads_prefix_cache and books.kv.enable_caching:
        plan.prefix_lookups.append((request.num_tokens, num_hit))


def _in_full(request: Request, block_ids: BlockIds, num_computed: int) -> ScheduledNewRequest:
    """All that a worker needs to know of a request that it does not know, or no longer."""
    return ScheduledNewRequest(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        sampling_params=request.sampling_params,
        block_ids=block_ids,
        num_computed_tokens=num_computed,
        pooling_params=request.pooling_params,
    )
