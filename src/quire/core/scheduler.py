"""The scheduler: which tokens the next step computes, and what its results mean.

The rules are vLLM V1's: running requests first, then waiting ones in strict order, prompts cut
into chunks under a token budget, preemption by recompute. It knows requests, blocks and limits;
it knows no tensors, no text, no clock but the one it is given.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from quire.config.scheduler import SchedulerConfig
from quire.core.admission import DelayGate, change_limits
from quire.core.batch import (
    BatchResult,
    BlockIds,
    ScheduledBatch,
    ScheduledNewRequest,
)
from quire.core.facts import FactKind, FactLog, Loss, Wait
from quire.core.integrity import check_books
from quire.core.kv.manager import KVCacheManager, PrefixMatch
from quire.core.output import EngineCoreOutput
from quire.core.plan import StepPlan
from quire.core.policy_loader import make_policy, move_waiting
from quire.core.request import Request, RequestStatus
from quire.core.stats import StepStats, collect_stats
from quire.core.swap_cost import SwapCost
from quire.core.undo import Change
from quire.core.undo import undo as undo_change
from quire.core.update import update_from_output
from quire.logger import get_logger
from quire.utils.math import cdiv
from quire.utils.timing import Clock, RealClock

logger = get_logger(__name__)


class Scheduler:
    """Decides each step and applies its results.

    Args:
        config: Limits and policy.
        kv: The KV cache manager; the scheduler is its only user.
        max_model_len: Longest prompt plus output.
        clock: Monotonic time, for the records.
        num_lookahead_tokens: KV slots kept ready after a request's tokens, for drafts.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int = 2**31,
        clock: Clock | None = None,
        num_lookahead_tokens: int = 0,
    ) -> None:
        self.config = config
        self.kv = kv
        self.max_model_len = max_model_len
        self.clock = clock or RealClock()
        self.requests: dict[str, Request] = {}
        self.waiting = make_policy(config, self.count_uncached)
        self.running: list[Request] = []
        """In order of admission."""
        self.finished_req_ids: list[str] = []
        """Ended since the last step; handed to the worker with the next one."""
        self.step = 0
        self.facts = FactLog()
        self.swap_cost = SwapCost(config.preemption_mode)
        self._lookahead = num_lookahead_tokens
        self.pool_counts = (0, 0, 0, 0)
        """Blocks allocated, freed, evicted and missed up to the last statistics."""
        self._max_running = config.max_num_seqs
        # more than max_num_seqs after that was lowered while they ran
        self._delay: DelayGate | None = None
        self.restart_delay()
        self._change: Change | None = None
        self.num_changes = 0
        """Changes that stand."""

    # ---- changes that hold or have not happened ----------------------------------------------

    def begin(self) -> None:
        """A change of the books begins. Until `commit`, `undo` takes all of it back."""
        assert self._change is None, "one change at a time"
        self._change = Change(self)

    def commit(self) -> None:
        """The change stands."""
        self._change, self.num_changes = None, self.num_changes + 1

    @property
    def is_changing(self) -> bool:
        """Whether a change has begun that is neither committed nor undone."""
        return self._change is not None

    def undo(self) -> None:
        """Bring the books back to where they were at `begin`, whatever state they are in. Requests
        that ran wait to be computed again; the worker must forget all it knows of any."""
        if self._change is not None:
            undo_change(self, self._change)
            self._change = None

    def restart_delay(self) -> None:
        """Nobody waits, as far as the delay that batches prompts is concerned."""
        factor = self.config.scheduler_delay_factor
        self._delay = DelayGate(factor) if factor else None

    def delay(self, request: Request) -> None:
        """A request waits for the first time."""
        if self._delay is not None:
            self._delay.add(request)

    # ---- requests in and out -----------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. Its id must not be in use."""
        assert request.request_id not in self.requests, f"{request.request_id} is already here"
        request.queued_ts = now = self.clock.now()
        if self._change is not None:
            self._change.added.append(request)
        request.number = self.facts.name(request.request_id)
        self.facts.at(now)
        self.facts.add(
            FactKind.QUEUED,
            request.number,
            a=request.num_prompt_tokens,
            b=request.num_output_tokens,
            c=request.priority,
        )
        self.requests[request.request_id] = request
        self.waiting.add_request(request)
        self.delay(request)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside (abort). Unknown ids are ignored.

        Returns:
            The requests that were ended.
        """
        ended = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        if self._change is not None:
            self._change.ended = {request.request_id: status for request in ended}
        for request in ended:
            if request.status is not RequestStatus.RUNNING:
                self.waiting.remove_request(request)
        was_running = [r for r in ended if r.status is RequestStatus.RUNNING]
        self.facts.at(self.clock.now())
        for request in ended:
            request.status = status
            self.free_request(request)
        if was_running:
            self.drop_finished()
        return ended

    def count_uncached(self, request: Request) -> int:
        """Tokens of a request that are in no KV block now; see `Policy`."""
        return request.num_tokens - self.kv.get_computed_blocks(request)[1]

    def set_limits(self, **changes: object) -> None:
        """Change limits or the policy while requests run; the names stand in `LIVE_LIMITS`.

        Waiting requests move to the new policy in the order they came. If fewer may run than do,
        none is stopped: no more are admitted until enough have ended.

        Raises:
            InvalidRequest: a name or value is bad; nothing has changed.
        """
        config = change_limits(self.config, changes, self.max_model_len)
        if config.scheduling_policy != self.config.scheduling_policy:
            policy = make_policy(config, self.count_uncached)
            move_waiting(self.waiting, policy, self.requests.values())
            self.waiting = policy
        if config != self.config:
            self.facts.limits(self.clock.now(), config.max_num_seqs, config.max_num_batched_tokens)
        self.waiting.config = self.config = config
        self._max_running = max(config.max_num_seqs, len(self.running))

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Give a request another priority, where it waits or runs; False if there is none of that
        id."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if request.status is RequestStatus.RUNNING:
            request.priority = priority
        else:
            self.waiting.change_priority(request, priority)
        return True

    @property
    def has_requests(self) -> bool:
        """Whether a step has anything to do: requests, or ended ones to announce."""
        return bool(self.requests or self.finished_req_ids)

    # ---- one step ----------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch:
        """Pick the tokens of the next step.

        There are no prefill or decode phases: every request lets `num_computed_tokens` catch up
        with `num_tokens`, within the budget. `num_computed_tokens` is advanced here, before the
        step runs.
        """
        self.step += 1
        now = self.clock.now()
        self.facts.begin_step(self.step, now)
        budget = self.config.max_num_batched_tokens
        self.facts.add(FactKind.STEP, 0, a=budget, b=len(self.running), c=len(self.waiting))
        self.kv.begin_step()
        plan = StepPlan(budget, now)
        if self._delay is not None:
            self._delay.begin_step(now)
        if self.waiting.waiting_first:
            self._admit_before_running(plan)
            self._continue_running(plan)
        else:
            self._continue_running(plan)
            if not plan.preempted:
                self._admit_waiting(plan)
            elif self.waiting:
                self._say_waits(self.waiting.peek_request(now), Wait.PREEMPTION)
        if self._delay is not None:
            self._delay.end_step(has_prompt=plan.num_prompt_tokens > 0)
        return self._freeze(plan)

    def _continue_running(self, plan: StepPlan) -> None:
        """Decodes and unfinished prompts, oldest first; may preempt to find room."""
        running = self.running
        chunk = self._chunk_limit()
        # Who was admitted in this step stands last and has its tokens.
        index, end = 0, len(running) - len(plan.admitted)
        while index < end and plan.budget > 0:
            request = running[index]
            index += 1
            computed = request.num_computed_tokens
            wanted = len(request.all_token_ids) + len(request.spec_token_ids) - computed
            num_new = min(wanted, chunk, plan.budget)
            if request.spec_token_ids:
                num_new = self._take_drafts(request, num_new, plan)
            if num_new != 1 or computed < request.num_prompt_tokens:
                drafts = len(plan.drafts.get(request.request_id, ()))
                self.facts.add(FactKind.CHUNK, request.number, a=num_new, b=computed, c=drafts)
            if num_new == 0:
                continue
            new_blocks: BlockIds = ()
            if computed + num_new > request.num_quiet_tokens:
                blocks = self._find_room(request, num_new, plan)
                if blocks is None:
                    index -= 1  # it has left its place
                    end = len(running) - len(plan.admitted)
                    break
                new_blocks = blocks
                if plan.preempted:
                    # Taking a victim from before this request has moved everything up.
                    index = running.index(request) + 1
                    end = len(running) - len(plan.admitted)
            plan.cached_ids.append(request.request_id)
            plan.new_blocks.append(new_blocks)
            plan.computed.append(computed)
            plan.take(request, num_new)
        if index < end:
            why = Wait.BUDGET if plan.budget <= 0 else Wait.BLOCKS
            self.facts.add(FactKind.STALLED, 0, why, a=end - index)

    def _take_drafts(self, request: Request, num_new: int, plan: StepPlan) -> int:
        """Have a request's drafts verified, as many as fit and could still become output.

        Returns:
            Tokens of the request in this step, drafts included.
        """
        drafts, request.spec_token_ids = list(request.spec_token_ids), ()
        num_tokens = request.num_tokens
        known = min(num_new, num_tokens - request.num_computed_tokens)
        # The step gives one token beyond the drafts anyway.
        useful = min(request.length_limit, self.max_model_len) - num_tokens - 1
        drafts = drafts[: max(0, min(num_new - known, useful))]
        if drafts:
            plan.drafts[request.request_id] = drafts
        return known + len(drafts)

    def _find_room(self, request: Request, num_new: int, plan: StepPlan) -> BlockIds | None:
        """Allocate for a running request, preempting others as long as it takes.

        Returns:
            The new blocks, or None if the request itself was the one to give way.
        """
        while True:
            blocks = self.kv.allocate_slots(request, num_new, num_lookahead_tokens=self._lookahead)
            if blocks is not None:
                return blocks
            victim = self.waiting.choose_victim(self.running)
            self._evict(victim, plan, Loss.BLOCKS, request)
            if victim is request:
                return None

    def _chunk_limit(self) -> int:
        """Most prompt tokens of one request in this step, besides the budget."""
        threshold = self.config.long_prefill_token_threshold
        count = len(self.running) + len(self.waiting)
        most = max(1, self.kv.max_chunk_tokens - self._lookahead)
        if count <= 1:
            return most
        if self.config.long_prefill_token_threshold_adaptive:
            return min(most, max(threshold, self.config.max_num_batched_tokens // count, 1))
        return min(most, threshold or most)

    def _evict(self, victim: Request, plan: StepPlan, why: Loss, winner: Request) -> None:
        """Take a running request's place and blocks, in this step too."""
        if victim is self.running[-1]:
            self.running.pop()
        else:
            self.running.remove(victim)
        if plan.give_back(victim):
            # Its blocks were registered for a computation that will not happen.
            self.kv.uncache_from(victim, victim.num_computed_tokens)
        self.preempt(victim, why, winner)
        plan.preempted.append(victim.request_id)

    def preempt(self, request: Request, why: Loss, winner: Request | None = None) -> None:
        """Put a request that has left `running` back into the queue, swapped out or to be
        recomputed: its blocks are freed, its output tokens are kept."""
        swapped = why is not Loss.FAILURE and self._swap_out(request)
        self.facts.add(
            FactKind.PREEMPTED,
            request.number,
            why,
            winner.number if winner else 0,
            a=request.num_computed_tokens,
            b=self.kv.num_blocks_of(request.request_id),
            c=int(swapped),
        )
        self.kv.free(request, keep_tail=why is not Loss.FAILURE)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = ()
        request.num_preemptions += 1
        self.waiting.prepend_request(request)

    def _swap_out(self, request: Request) -> bool:
        """Keep what a request has computed in the second tier, if that is there and cheaper."""
        swap, params = self.kv.swap, request.sampling_params
        if swap is None:
            return False
        scores = params.prompt_logprobs is not None and not request.num_output_tokens
        if scores or request.pooling_params is not None:
            return False  # the worker forgets what it has gathered of the prompt
        num_blocks = self.kv.num_blocks_of(request.request_id)
        if not self.swap_cost.prefers_swap(request.num_computed_tokens, num_blocks):
            return False
        return swap.swap_out(request)

    def _admit_before_running(self, plan: StepPlan) -> None:
        """Waiting requests first. Unfinished prompts keep their part of the budget, and running
        requests the blocks for their next tokens: none is preempted for who was just admitted."""
        if not self.waiting:
            return
        chunk = min(self._chunk_limit(), plan.budget)
        lacking = [r.num_tokens - r.num_computed_tokens for r in self.running]
        set_aside = min(plan.budget, sum(min(n, chunk) for n in lacking if n > 1))
        plan.budget -= set_aside
        blocks = sum(cdiv(n, self.kv.block_size) for n in lacking)
        self._admit_waiting(plan, blocks * len(self.kv.windows))
        plan.budget += set_aside

    def _admit_waiting(self, plan: StepPlan, keep_free: int = 0) -> None:
        """Waiting requests, strictly in order: the first that does not fit ends the search.

        Args:
            plan: The step.
            keep_free: Blocks that must stay free.
        """
        if not self.waiting:
            return
        now = plan.now
        if self._delay and self.running and not self._delay.is_open():
            self._say_waits(self.waiting.peek_request(now), Wait.POLICY)
            return
        chunk = self._chunk_limit()
        keep_free += int(self.config.watermark * self.kv.block_pool.num_blocks)
        while self.waiting:
            request = self.waiting.peek_request(now)
            if plan.preempted and request.request_id in plan.preempted:
                return self._say_waits(request, Wait.PREEMPTION)  # for a more urgent one
            if plan.budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                if self._displace(request, 0, plan):
                    continue
                return self._say_no_place(request, plan)
            prefix = self.kv.find_prefix(request)
            num_new = min(request.num_tokens - prefix.num_tokens, chunk)
            if num_new > plan.budget and not self.config.enable_chunked_prefill:
                return self._say_waits(request, Wait.BUDGET, num_new, plan.budget)
            num_new = min(num_new, plan.budget)
            whole = self.config.scheduler_reserve_full_isl
            num_tokens = request.num_tokens if whole else prefix.num_tokens + num_new
            lacking = self.kv.lacking_blocks(num_tokens + self._lookahead, prefix.hits)
            lacking += keep_free if self.running else 0
            if lacking > 0:
                if self._displace(request, lacking, plan):
                    continue
                free = self.kv.block_pool.get_num_free_blocks()
                return self._say_waits(request, Wait.BLOCKS, free + lacking, free)
            if self._change is not None:
                self._change.admitted.append((request, request.status, request.num_tokens))
            block_ids, copies = self.kv.admit(request, prefix, num_new, self._lookahead)
            plan.block_copies += copies
            self.waiting.admit_request(request)
            self._admit(request, prefix, num_new, plan, block_ids)

    def _say_no_place(self, request: Request, plan: StepPlan) -> None:
        if len(self.running) >= self.config.max_num_seqs:
            limit = self.config.max_num_seqs
            self._say_waits(request, Wait.MAX_NUM_SEQS, len(self.running) + 1, limit)
        else:
            self._say_waits(request, Wait.BUDGET, 1, 0)

    def _say_waits(self, request: Request, why: Wait, needed: int = 0, available: int = 0) -> None:
        self.facts.waits(request.number, why, needed, available)

    def _displace(self, request: Request, lacking: int, plan: StepPlan) -> bool:
        """Preempt a running request for a waiting one, if the policy lets it and it helps.

        Args:
            request: Waits and finds no room.
            lacking: Blocks it lacks; 0 if it lacks a seat or tokens of the budget.
            plan: The step.
        """
        if not self.waiting.displaces:
            return False
        if any(new.num_computed_tokens for new in plan.admitted):
            return False  # it may read blocks that the victim was to compute in this step
        new_ids = {new.req_id for new in plan.admitted}
        candidates = [
            r
            for r in self.running
            if self.waiting.may_displace(request, r, plan.now) and r.request_id not in new_ids
        ]
        if plan.budget <= 0:
            candidates = [r for r in candidates if r.request_id in plan.scheduled]
        held = sum(self.kv.num_blocks_of(r.request_id) for r in candidates)
        if not candidates or held < lacking:
            return False
        victim = self.waiting.choose_victim(candidates)
        self._evict(victim, plan, Loss.URGENCY, request)
        return True

    def _admit(
        self,
        request: Request,
        prefix: PrefixMatch,
        num_new: int,
        plan: StepPlan,
        block_ids: BlockIds,
    ) -> None:
        again, num_hit = request.status is not RequestStatus.WAITING, prefix.num_tokens
        found = self.kv.num_blocks_in(prefix.hits)
        self.facts.add(
            FactKind.ADMITTED,
            request.number,
            2 if prefix.is_swapped else int(again),
            a=num_new,
            b=num_hit,
            c=found,
            d=self.kv.num_blocks_of(request.request_id) - found,
        )
        if not again:
            request.scheduled_ts = plan.now
            request.num_cached_tokens = num_hit
            request.num_promoted_tokens = prefix.num_promoted
            if request.sampling_params.reads_prefix_cache and self.kv.enable_caching:
                plan.prefix_lookups.append((request.num_tokens, num_hit))
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit
        self.running.append(request)
        plan.take(request, num_new)
        plan.admitted.append(
            ScheduledNewRequest(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=request.output_token_ids,
                sampling_params=request.sampling_params,
                block_ids=block_ids,
                num_computed_tokens=num_hit,
                pooling_params=request.pooling_params,
            )
        )

    def _freeze(self, plan: StepPlan) -> ScheduledBatch:
        moves = self.kv.swap.take_moves() if self.kv.swap else ([], [])
        batch = plan.freeze(self.step, self.finished_req_ids, moves)
        self.finished_req_ids = []
        if logger.isEnabledFor(logging.DEBUG):
            plan.log(len(self.running), len(self.waiting))
        return batch

    # ---- results -----------------------------------------------------------------------------

    def update(self, batch: ScheduledBatch, result: BatchResult) -> list[EngineCoreOutput]:
        """Apply what a step produced: append tokens, stop, free.

        Requests that were ended meanwhile are ignored. Prompt chunks that did not reach the last
        token yield nothing.

        Returns:
            One output for each request that has new tokens or ended.
        """
        self.facts.at(self.clock.now())
        return update_from_output(self, batch, result)

    update_from_output = update

    def free_request(self, request: Request) -> None:
        """Let go of everything an ended request holds, except its place in `running`."""
        self.facts.add(
            FactKind.FINISHED,
            request.number,
            request.status,
            a=request.num_output_tokens,
            b=self.kv.num_blocks_of(request.request_id),
        )
        failed = request.status is RequestStatus.FINISHED_ERROR
        self.kv.free(request, keep_tail=not failed)
        if self.kv.swap is not None:
            self.kv.swap.drop(request.request_id)
        self.waiting.finish_request(request)
        self.finished_req_ids.append(request.request_id)
        del self.requests[request.request_id]

    def drop_finished(self) -> None:
        """Ended requests leave `running`."""
        self.running = [r for r in self.running if not r.status.is_finished]

    # ---- facts -------------------------------------------------------------------------------

    def make_stats(
        self, batch: ScheduledBatch, result: BatchResult, outputs: list[EngineCoreOutput]
    ) -> StepStats:
        """Facts about the step just applied."""
        return collect_stats(self, batch, result, outputs)

    def check_integrity(self) -> None:
        """Check that queues, statuses and blocks agree; when idle, that every block is free.

        Raises:
            AssertionError: naming what is wrong.
        """
        check_books(self.requests, self.waiting, self.running, self._max_running, self.kv)
