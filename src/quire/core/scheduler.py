"""The scheduler: which tokens the next step computes, and what its results mean.

The rules are vLLM V1's: running requests first, then waiting ones in strict order, prompts cut
into chunks under a token budget, preemption by recompute. It knows requests, blocks and limits;
it knows no tensors, no text, no clock but the one it is given.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from quire.config.scheduler import SchedulerConfig
from quire.core.batch import (
    BatchResult,
    ScheduledBatch,
    ScheduledCachedRequests,
    ScheduledNewRequest,
    TokenLogprobs,
)
from quire.core.kv.manager import KVCacheManager
from quire.core.output import EngineCoreOutput
from quire.core.queue import QUEUES, RequestQueue, priority_key
from quire.core.request import Request, RequestStatus
from quire.core.stats import StepStats
from quire.core.stop import check_stop
from quire.logger import get_logger
from quire.utils.timing import Clock, RealClock

if TYPE_CHECKING:
    from quire.core.kv.block import KVBlock

logger = get_logger(__name__)


class StepPlan:
    """What one step will hold, while it is being put together. Owns the token budget."""

    __slots__ = (
        "admitted",
        "budget",
        "cached_ids",
        "computed",
        "new_blocks",
        "num_prompt_tokens",
        "preempted",
        "prefix_hits",
        "prefix_queries",
        "scheduled",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.scheduled: dict[str, int] = {}
        self.admitted: list[ScheduledNewRequest] = []
        self.cached_ids: list[str] = []
        self.new_blocks: list[list[int]] = []
        self.computed: list[int] = []
        self.preempted: list[str] = []
        self.num_prompt_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def take(self, request: Request, num_tokens: int) -> None:
        """Spend budget on a request and advance it."""
        computed = request.num_computed_tokens
        if computed < request.num_prompt_tokens:
            self.num_prompt_tokens += min(num_tokens, request.num_prompt_tokens - computed)
        self.scheduled[request.request_id] = num_tokens
        self.budget -= num_tokens
        request.num_computed_tokens = computed + num_tokens

    def give_back(self, request: Request) -> bool:
        """Undo `take` for a running request that loses its place; False if it had none."""
        num_tokens = self.scheduled.pop(request.request_id, None)
        if num_tokens is None:
            return False
        index = self.cached_ids.index(request.request_id)
        computed = self.computed[index]
        for parallel in (self.cached_ids, self.new_blocks, self.computed):
            del parallel[index]
        if computed < request.num_prompt_tokens:
            self.num_prompt_tokens -= min(num_tokens, request.num_prompt_tokens - computed)
        self.budget += num_tokens
        request.num_computed_tokens = computed
        return True


class Scheduler:
    """Decides each step and applies its results.

    Args:
        config: Limits and policy.
        kv: The KV cache manager; the scheduler is its only user.
        max_model_len: Longest prompt plus output.
        clock: Monotonic time, for queue-time facts.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int = 2**31,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.max_model_len = max_model_len
        self.clock = clock or RealClock()
        self.requests: dict[str, Request] = {}
        self.waiting: RequestQueue = QUEUES[config.scheduling_policy]()
        self.running: list[Request] = []
        """In order of admission."""
        self.finished_req_ids: list[str] = []
        """Ended since the last step; handed to the worker with the next one."""
        self.step = 0

    # ---- requests in and out -----------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. Its id must not be in use."""
        assert request.request_id not in self.requests, f"{request.request_id} is already here"
        request.queued_ts = self.clock.now()
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside (abort). Unknown ids are ignored.

        Returns:
            The requests that were ended.
        """
        ended = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        for request in ended:
            if request.status is not RequestStatus.RUNNING:
                self.waiting.remove_request(request)
        was_running = [r for r in ended if r.status is RequestStatus.RUNNING]
        for request in ended:
            request.status = status
            self._free(request)
        if was_running:
            self._drop_finished_from_running()
        return ended

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
        plan = StepPlan(self.config.max_num_batched_tokens)
        self._continue_running(plan)
        if not plan.preempted:
            self._admit_waiting(plan)
        return self._freeze(plan)

    def _continue_running(self, plan: StepPlan) -> None:
        """Decodes and unfinished prompts, oldest first; may preempt to find room."""
        running = self.running
        chunk = self._chunk_limit()
        index = 0
        while index < len(running) and plan.budget > 0:
            request = running[index]
            index += 1
            computed = request.num_computed_tokens
            num_new = min(len(request.all_token_ids) - computed, chunk, plan.budget)
            if num_new == 0:
                continue
            new_blocks: list[int] = []
            if computed + num_new > request.num_quiet_tokens:
                blocks = self._find_room(request, num_new, plan)
                if blocks is None:
                    return
                new_blocks = [b.block_id for b in blocks]
                if plan.preempted:
                    # Taking a victim from before this request has moved everything up.
                    index = running.index(request) + 1
            plan.cached_ids.append(request.request_id)
            plan.new_blocks.append(new_blocks)
            plan.computed.append(computed)
            plan.take(request, num_new)

    def _find_room(self, request: Request, num_new: int, plan: StepPlan) -> list[KVBlock] | None:
        """Allocate for a running request, preempting others as long as it takes.

        Returns:
            The new blocks, or None if the request itself was the one to give way.
        """
        while (blocks := self.kv.allocate_slots(request, num_new)) is None:
            if self._preempt_one(plan) is request:
                return None
        return blocks

    def _chunk_limit(self) -> int:
        """Most prompt tokens of one request in this step, besides the budget."""
        threshold = self.config.long_prefill_token_threshold
        alone = len(self.running) + len(self.waiting) <= 1
        return threshold if threshold and not alone else 2**62

    def _preempt_one(self, plan: StepPlan) -> Request:
        """Take the blocks of the request that has least right to them."""
        if self.config.scheduling_policy == "priority":
            victim = max(self.running, key=priority_key)
            self.running.remove(victim)
        else:
            victim = self.running.pop()
        if plan.give_back(victim):
            # Its blocks were registered for a computation that will not happen.
            self.kv.uncache_from(victim, victim.num_computed_tokens)
        self._preempt(victim, plan.preempted)
        return victim

    def _preempt(self, request: Request, preempted: list[str]) -> None:
        """Recompute later: blocks are freed, output tokens are kept."""
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.prepend_request(request)
        preempted.append(request.request_id)

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Waiting requests, strictly in order: the first that does not fit ends the search."""
        chunk = self._chunk_limit()
        while self.waiting and plan.budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek_request()
            hit_blocks, num_hit = self.kv.get_computed_blocks(request)
            num_new = min(request.num_tokens - num_hit, chunk)
            if num_new > plan.budget and not self.config.enable_chunked_prefill:
                return
            num_new = min(num_new, plan.budget)
            if self.kv.allocate_slots(request, num_new, hit_blocks) is None:
                return
            self.waiting.pop_request()
            self._admit(request, num_hit, num_new, plan)

    def _admit(self, request: Request, num_hit: int, num_new: int, plan: StepPlan) -> None:
        if request.status is RequestStatus.WAITING:
            request.scheduled_ts = self.clock.now()
            request.num_cached_tokens = num_hit
            if request.sampling_params.reads_prefix_cache and self.kv.enable_caching:
                plan.prefix_queries += request.num_tokens
                plan.prefix_hits += num_hit
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
                block_ids=self.kv.get_block_ids(request.request_id),
                num_computed_tokens=num_hit,
            )
        )

    def _freeze(self, plan: StepPlan) -> ScheduledBatch:
        """Turn the plan into a batch."""
        batch = ScheduledBatch(
            step=self.step,
            scheduled_new_reqs=plan.admitted,
            scheduled_cached_reqs=ScheduledCachedRequests(
                req_ids=plan.cached_ids,
                new_block_ids=plan.new_blocks,
                num_computed_tokens=plan.computed,
            ),
            num_scheduled_tokens=plan.scheduled,
            total_num_scheduled_tokens=self.config.max_num_batched_tokens - plan.budget,
            preempted_req_ids=plan.preempted,
            finished_req_ids=self.finished_req_ids,
            num_prompt_tokens=plan.num_prompt_tokens,
            prefix_queries=plan.prefix_queries,
            prefix_hits=plan.prefix_hits,
        )
        self.finished_req_ids = []
        if logger.isEnabledFor(logging.DEBUG):
            self._log_step(batch)
        return batch

    def _log_step(self, batch: ScheduledBatch) -> None:
        scheduled = ", ".join(f"{i}: {n}" for i, n in batch.num_scheduled_tokens.items())
        logger.debug(
            "[SCHED] step n_running=%d n_waiting=%d total_tokens=%d new=[%s] preempted=[%s] "
            "num_scheduled_tokens = {%s}",
            len(self.running),
            len(self.waiting),
            batch.total_num_scheduled_tokens,
            ", ".join(r.req_id for r in batch.scheduled_new_reqs),
            ", ".join(batch.preempted_req_ids),
            scheduled,
        )

    # ---- results -----------------------------------------------------------------------------

    def update(self, batch: ScheduledBatch, result: BatchResult) -> list[EngineCoreOutput]:
        """Apply what a step produced: append tokens, stop, free.

        Requests that were ended meanwhile are ignored. Prompt chunks that did not reach the last
        token yield nothing.

        Returns:
            One output for each request that has new tokens or ended.
        """
        outputs: list[EngineCoreOutput] = []
        distrusted = self._fail_requests(batch, result, outputs)
        finished = bool(outputs)
        requests, max_model_len = self.requests, self.max_model_len
        for request_id, tokens in result.sampled_token_ids.items():
            request = requests.get(request_id)
            if request is None or request_id in distrusted:
                continue
            everything = request.all_token_ids
            num_tokens = len(everything) + 1
            if (
                len(tokens) == 1
                and request.num_prompt_tokens < num_tokens - 1
                and num_tokens < request.length_limit
                and num_tokens < max_model_len
                and tokens[0] not in request.stop_ids
                and request_id not in result.logprobs
            ):
                # The common case: one more token, nothing to report but it.
                everything.append(tokens[0])
                outputs.append(EngineCoreOutput(request_id, tokens))
                continue
            output = self._append_tokens(request, tokens, result)
            finished |= output.finish_reason is not None
            outputs.append(output)
        if finished:
            self._drop_finished_from_running()
        return outputs

    update_from_output = update

    def _append_tokens(
        self, request: Request, tokens: list[int], result: BatchResult
    ) -> EngineCoreOutput:
        first = request.num_output_tokens == 0
        kept = 0
        for token in tokens:
            request.all_token_ids.append(token)
            kept += 1
            if check_stop(request, self.max_model_len):
                break
        logprobs = result.logprobs.get(request.request_id)
        prompt_logprobs = result.prompt_logprobs.get(request.request_id) if first else None
        output = self._output(request, tokens[:kept], logprobs and logprobs[:kept], prompt_logprobs)
        if request.status.is_finished:
            self._free(request)
        return output

    def _fail_requests(
        self, batch: ScheduledBatch, result: BatchResult, outputs: list[EngineCoreOutput]
    ) -> set[str]:
        """End the requests that failed alone, and compute again what others read from them.

        Returns:
            Ids whose result of this step must not be used.
        """
        if not result.failed:
            return set()
        suspect: set[int] = set()
        for request_id, reason in result.failed.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            suspect.update(self.kv.uncache_from(request, max(0, request.num_cached_tokens)))
            request.status = RequestStatus.FINISHED_ERROR
            request.error = reason
            outputs.append(self._output(request, [], None, None))
            self._free(request)
        self._drop_finished_from_running()
        return {*result.failed, *self._recompute_readers(suspect, batch)}

    def _recompute_readers(self, suspect: set[int], batch: ScheduledBatch) -> list[str]:
        """Preempt the requests that hold blocks of a failed one: they shared them as a prefix."""
        again: list[str] = []
        for request in reversed(self.running[:]):
            if suspect.isdisjoint(self.kv.get_block_ids(request.request_id)):
                continue
            self.kv.uncache_from(request, 0)
            self.running.remove(request)
            self._preempt(request, again)
        # The worker still holds their state; a resumed request replaces it.
        return again

    def _output(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs | None] | None,
    ) -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=token_ids,
            new_logprobs=logprobs,
            new_prompt_logprobs=prompt_logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            num_cached_tokens=max(0, request.num_cached_tokens),
            queued_ts=request.queued_ts,
            scheduled_ts=request.scheduled_ts,
            num_preemptions=request.num_preemptions,
            error=request.error,
        )

    def _free(self, request: Request) -> None:
        """Let go of everything an ended request holds, except its place in `running`."""
        self.kv.free(request)
        self.finished_req_ids.append(request.request_id)
        del self.requests[request.request_id]

    def _drop_finished_from_running(self) -> None:
        self.running = [r for r in self.running if not r.status.is_finished]

    # ---- facts -------------------------------------------------------------------------------

    def make_stats(
        self, batch: ScheduledBatch, result: BatchResult, outputs: list[EngineCoreOutput]
    ) -> StepStats:
        """Facts about the step just applied."""
        generated = sum(len(o.new_token_ids) for o in outputs)
        return StepStats(
            step=batch.step,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=self.kv.usage,
            num_prompt_tokens=batch.num_prompt_tokens,
            num_generation_tokens=generated,
            num_scheduled_tokens=batch.total_num_scheduled_tokens,
            num_preempted=len(batch.preempted_req_ids),
            prefix_queries=batch.prefix_queries,
            prefix_hits=batch.prefix_hits,
            forward_seconds=result.forward_seconds,
        )

    def check_integrity(self) -> None:
        """Check that queues, statuses and blocks agree; when idle, that every block is free.

        Raises:
            AssertionError: naming what is wrong.
        """
        waiting, running = list(self.waiting), self.running
        ids = [r.request_id for r in (*waiting, *running)]
        assert len(ids) == len(set(ids)), "a request stands in two places"
        assert set(ids) == set(self.requests), "a request is lost or forgotten"
        assert len(running) <= self.config.max_num_seqs, "more run than max_num_seqs"
        for request in running:
            assert request.status is RequestStatus.RUNNING, f"{request} is in running"
            assert request.num_computed_tokens <= request.num_tokens, f"{request} is ahead"
            held = len(self.kv.get_block_ids(request.request_id)) * self.kv.block_size
            assert held >= request.num_computed_tokens, f"{request} has KV outside its blocks"
        for request in waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{request}"
            assert not self.kv.get_block_ids(request.request_id), f"{request} waits holding blocks"
        self.kv.check_integrity()
        if not self.requests:
            assert self.kv.usage == 0.0, f"idle, but {self.kv.usage:.1%} of the blocks are held"
