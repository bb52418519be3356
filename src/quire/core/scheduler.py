"""The scheduler: which tokens the next step computes, and what its results mean.

The rules are vLLM V1's: running requests first, then waiting ones in strict order, prompts cut
into chunks under a token budget, preemption by recompute. They stand in `quire.core.rules`, one
file each, and act on the books (`quire.core.books`); this is the face that an engine, a simulator
and tests use. It knows requests, blocks and limits; it knows no tensors, no text, no clock but the
one it is given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Any

from quire.config.scheduler import SchedulerConfig
from quire.core.admission import change_limits
from quire.core.batch import BatchResult, ScheduledBatch
from quire.core.books import Books
from quire.core.facts import FactKind, FactLog, Wait
from quire.core.kv.manager import KVCacheManager
from quire.core.output import EngineCoreOutput
from quire.core.plan import StepPlan
from quire.core.policies import Policy
from quire.core.policy_loader import make_policy, move_waiting
from quire.core.request import Request, RequestStatus
from quire.core.rules.admit import admit_before_running, admit_waiting, say_waits
from quire.core.rules.aside import bring_back, set_aside
from quire.core.rules.collect import collect_stats
from quire.core.rules.continue_running import continue_running
from quire.core.rules.in_flight import land, launch, take_back
from quire.core.rules.rebuild import describe, rebuild
from quire.core.rules.undo import undo
from quire.core.rules.update import update_from_output
from quire.core.stats import StepStats
from quire.logger import get_logger
from quire.utils.timing import Clock, RealClock

logger = get_logger(__name__)


class Scheduler:
    """Decides each step and applies its results.

    Args:
        config: Limits and policy.
        kv: The KV cache manager; the scheduler is its only user.
        max_model_len: Longest prompt plus output, in tokens.
        clock: Monotonic time, for the records.
        num_lookahead_tokens: KV slots kept ready after a request's tokens, for drafts.
        max_in_flight: Batches that may be scheduled before the result of the first is applied;
            results are applied in order.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int = 2**31,
        clock: Clock | None = None,
        num_lookahead_tokens: int = 0,
        max_in_flight: int = 1,
    ) -> None:
        self.books = Books(
            config, kv, max_model_len, clock or RealClock(), num_lookahead_tokens, max_in_flight
        )
        """All state; see its fields for what the properties here give."""
        self.num_changes = 0
        """Changes that stand."""

    # ---- one step ----------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch:
        """Pick the tokens of the next step.

        There are no prefill or decode phases: every request lets `num_computed_tokens` catch up
        with `num_tokens`, within the budget. `num_computed_tokens` is advanced here, before the
        step runs.
        """
        books, plan = self.books, self._begin_step()
        if books.waiting.waiting_first:
            admit_before_running(books, plan)
            continue_running(books, plan)
        else:
            continue_running(books, plan)
            if not plan.preempted:
                admit_waiting(books, plan)
            elif books.waiting:
                say_waits(books, books.waiting.peek_request(plan.now), Wait.PREEMPTION)
        return self._freeze(plan)

    def update(self, batch: ScheduledBatch, result: BatchResult) -> list[EngineCoreOutput]:
        """Apply what a step produced: append tokens, stop, free.

        Requests that were ended meanwhile are ignored. Prompt chunks that did not reach the last
        token yield nothing.

        Args:
            batch: The oldest whose result has not been applied.
            result: Of this batch. With other batches in flight, what no longer counts is taken out
                of it.

        Returns:
            One output for each request that has new tokens or ended.
        """
        if self.books.in_flight:
            land(self.books, batch, result)
        self.books.facts.at(self.books.clock.now())
        return update_from_output(self.books, batch, result)

    def make_stats(
        self, batch: ScheduledBatch, result: BatchResult, outputs: list[EngineCoreOutput]
    ) -> StepStats:
        """Facts about the step just applied."""
        return collect_stats(self.books, batch, result, outputs)

    def _begin_step(self) -> StepPlan:
        books = self.books
        books.step += 1
        now, budget = books.clock.now(), books.config.max_num_batched_tokens
        books.facts.begin_step(books.step, now)
        num_running, num_waiting = len(books.running), len(books.waiting)
        books.facts.add(FactKind.STEP, 0, a=budget, b=num_running, c=num_waiting)
        books.kv.begin_step()
        if books.delay_gate is not None:
            books.delay_gate.begin_step(now)
        return StepPlan(budget, now, self._chunk_limit(num_running + num_waiting))

    def _chunk_limit(self, num_requests: int) -> int:
        """Most tokens of one request in a step, besides the budget."""
        books, config = self.books, self.books.config
        most = max(1, books.kv.max_chunk_tokens - books.num_lookahead_tokens)
        if num_requests <= 1:
            return most  # nobody else is kept waiting by a long prompt
        threshold = config.long_prefill_token_threshold
        if config.long_prefill_token_threshold_adaptive:
            fair = config.max_num_batched_tokens // num_requests
            return min(most, max(threshold, fair, 1))
        return min(most, threshold or most)

    def _freeze(self, plan: StepPlan) -> ScheduledBatch:
        books = self.books
        if books.delay_gate is not None:
            books.delay_gate.end_step(has_prompt=plan.num_prompt_tokens > 0)
        moves = books.kv.swap.take_moves() if books.kv.swap else ([], [])
        batch = plan.freeze(books.step, books.finished_req_ids, moves)
        books.finished_req_ids = []
        if books.max_in_flight > 1:
            launch(books, batch)
        if logger.isEnabledFor(logging.DEBUG):
            plan.log(len(books.running), len(books.waiting))
        return batch

    # ---- batches in flight -------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Batches scheduled whose result was not applied, where there may be more than one."""
        return len(self.books.in_flight)

    @property
    def can_fill(self) -> bool:
        """Whether a batch on top of those in flight could hold tokens: a request whose next token
        is in flight waits for it, but chunks of a prompt and new requests do not."""
        books = self.books
        return bool(books.waiting) or any(
            r.num_tokens_with_spec > r.num_computed_tokens for r in books.running
        )

    @property
    def is_in_doubt(self) -> bool:
        """Whether a batch had a failure and others were scheduled on top of it, so that
        `take_back` is to be called."""
        return self.books.doubt is not None

    def take_back(self) -> None:
        """Take back all batches in flight, after `is_in_doubt`. The requests in them wait to be
        computed again; the worker must forget all it knows of any."""
        take_back(self.books)

    # ---- changes that hold or have not happened ----------------------------------------------

    def begin(self) -> None:
        """A change of the books begins. Until `commit`, `undo` takes all of it back."""
        self.books.begin_change()

    def commit(self) -> None:
        """The change stands."""
        self.books.change, self.num_changes = None, self.num_changes + 1

    @property
    def is_changing(self) -> bool:
        """Whether a change has begun that is neither committed nor undone."""
        return self.books.change is not None

    def undo(self) -> None:
        """Bring the books back to where they were at `begin`, whatever state they are in. Requests
        that ran wait to be computed again; the worker must forget all it knows of any."""
        if self.books.change is not None:
            undo(self.books, self.books.change)
            self.books.change = None

    def keep_only(self, keep: Container[str] | None) -> None:
        """Leave all other requests out of the steps that follow; `None` brings them all back.
        Requests that ran wait to be computed again, as after `undo`, so the worker must forget all
        it knows of any. Not within a change."""
        self.begin()
        self.undo()
        # Outside any change: neither of the two can be left half done by what a request causes.
        if keep is None:
            bring_back(self.books)
        else:
            set_aside(self.books, keep)

    def rebuild(self) -> None:
        """Make the books anew from the tokens of the requests; see `rules.rebuild`. Not within a
        change. The worker must forget all it knows of any request."""
        rebuild(self.books)

    def describe(self) -> dict[str, Any]:
        """What stands in the books, without any token of a prompt or an output."""
        return describe(self.books)

    # ---- requests in and out -----------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. Its id must not be in use."""
        books, name = self.books, request.request_id
        assert name not in books.requests, f"{name} is already here"
        request.queued_ts = now = books.clock.now()
        if books.change is not None:
            books.change.added.append(request)
        request.number = books.facts.name(name)
        books.facts.at(now)
        books.facts.add(
            FactKind.QUEUED,
            request.number,
            a=request.num_prompt_tokens,
            b=request.num_output_tokens,
            c=request.priority,
        )
        books.queue(request)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside (abort). Unknown ids are ignored.

        Returns:
            The requests that were ended.
        """
        books = self.books
        known = books.requests
        ended = [known[i] for i in dict.fromkeys(request_ids) if i in known]
        if books.change is not None:
            books.change.ended = {request.request_id: status for request in ended}
        for request in ended:
            if books.compiling.pop(request.request_id, None) is not None:
                continue
            if request.status is not RequestStatus.RUNNING:
                books.waiting.remove_request(request)
        any_ran = any(r.status is RequestStatus.RUNNING for r in ended)
        books.facts.at(books.clock.now())
        for request in ended:
            request.status = status
            books.end(request)
        if any_ran:
            books.drop_finished()
        return ended

    def queue_compiled(self, is_compiled: Callable[[Request], bool]) -> None:
        """Requests whose grammar has been compiled join the queue, in the order they came.

        Args:
            is_compiled: Whether that is so, or compiling failed: then the worker says so when the
                request is scheduled.
        """
        for request in list(self.books.compiling.values()):
            if is_compiled(request):
                self.books.queue_compiled(request)

    # ---- limits ------------------------------------------------------------------------------

    def set_limits(self, **changes: object) -> None:
        """Change limits or the policy while requests run; the names stand in `LIVE_LIMITS`.

        Waiting requests move to the new policy in the order they came. If fewer may run than do,
        none is stopped: no more are admitted until enough have ended.

        Raises:
            InvalidRequest: a name or value is bad; nothing has changed.
        """
        books, old = self.books, self.books.config
        config = change_limits(old, changes, books.max_model_len)
        if config.scheduling_policy != old.scheduling_policy:
            policy = make_policy(config, books.count_uncached)
            move_waiting(books.waiting, policy, books.requests.values())
            books.waiting = policy
        if config != old:
            books.facts.limits(
                books.clock.now(), config.max_num_seqs, config.max_num_batched_tokens
            )
        books.waiting.config = books.config = config
        books.max_running = max(config.max_num_seqs, len(books.running))

    # ---- the prefix cache --------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; refused (False) while requests hold blocks."""
        books = self.books
        done = books.kv.reset_prefix_cache()
        if done:
            books.facts.cache_dropped(books.clock.now(), only_free=False)
        return done

    def drop_free_content(self) -> int:
        """Give up the cached content of all blocks that nobody holds.

        Returns:
            How many blocks had some.
        """
        books = self.books
        dropped = books.kv.block_pool.drop_free_content()
        books.facts.cache_dropped(books.clock.now(), only_free=True)
        return dropped

    # ---- priorities --------------------------------------------------------------------------

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Give a request another priority, where it waits or runs; False if there is none of that
        id."""
        request = self.books.requests.get(request_id)
        if request is None:
            return False
        if request.status is RequestStatus.RUNNING or request_id in self.books.compiling:
            request.priority = priority
        else:
            self.books.waiting.change_priority(request, priority)
        return True

    # ---- what the books say ------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether a step has anything to do: requests, or ended ones to announce."""
        return bool(self.books.requests or self.books.finished_req_ids)

    @property
    def requests(self) -> dict[str, Request]:
        """All requests that have not ended, by id."""
        return self.books.requests

    @property
    def waiting(self) -> Policy:
        """The waiting requests, in the order of the policy."""
        return self.books.waiting

    @property
    def compiling(self) -> Collection[Request]:
        """The requests that wait for their grammar."""
        return self.books.compiling.values()

    @property
    def running(self) -> list[Request]:
        """The running requests, in order of admission."""
        return self.books.running

    @property
    def kv(self) -> KVCacheManager:
        """The KV cache manager."""
        return self.books.kv

    @property
    def config(self) -> SchedulerConfig:
        """The limits and the policy that hold now."""
        return self.books.config

    @property
    def facts(self) -> FactLog:
        """The records of the step."""
        return self.books.facts

    @property
    def clock(self) -> Clock:
        """The clock of the records."""
        return self.books.clock

    @property
    def step(self) -> int:
        """Number of the latest step."""
        return self.books.step

    def check_integrity(self) -> None:
        """Check that queues, statuses and blocks agree; when idle, that every block is free.

        Raises:
            AssertionError: naming what is wrong.
        """
        self.books.check_integrity()

    def integrity_parts(self) -> Iterator[None]:
        """`check_integrity` part by part: there may be steps between two."""
        return self.books.integrity_parts()
