"""The engine core: a loop that schedules a batch, has it computed and applies the result.

It owns a scheduler and an executor. It knows no sockets, no text and no HTTP. Whoever drives it
(`LLM` in its own process, an engine-core process, a test) calls `step()` while there are requests.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from quire.config import EngineConfig
from quire.core.batch import ScheduledBatch
from quire.core.build import build_scheduler
from quire.core.output import EngineCoreOutput, failed_output
from quire.core.policy_loader import policy_class
from quire.core.request import Request, RequestStatus
from quire.core.stats import StepStats
from quire.engine.memory_pressure import MemoryPressure
from quire.engine.messages import EngineCoreRequest
from quire.engine.starvation import StarvationWatch
from quire.engine.verbs import find_verb
from quire.errors import QuireError
from quire.executor.base import Executor, PendingBatch, make_executor
from quire.logger import get_logger
from quire.plugins import check_wanted
from quire.utils.collector import paused_collector
from quire.utils.math import human_bytes
from quire.utils.signals import pass_on_signals
from quire.utils.timing import Clock, RealClock

logger = get_logger(__name__)

ProgressCallback = Callable[[str, int, int], None]
AUDIT_SHARE: Final = 0.002
"""Most of the time that the books are checked in."""
AUDIT_SECONDS: Final = 0.001
"""After which what is left to check is put off, however large the books are."""
GRAMMAR_WAIT: Final = 0.005
"""Seconds for which a step with nothing to compute waits for a grammar. Messages wait as long."""
AUDIT_STEPS: Final = 64
"""Steps after which a busy engine goes on checking them, if it is within that share: its next step
waits meanwhile."""

T = TypeVar("T")
Produced = tuple[list[EngineCoreOutput], StepStats]


def _as_they_are(outputs: list[EngineCoreOutput], stats: StepStats) -> Produced:
    return outputs, stats


class _Submitted(NamedTuple):
    batch: ScheduledBatch
    pending: PendingBatch
    attended: int
    """`ScheduledBatch.num_attended_tokens`."""
    scheduled: float
    """When it was put together."""


class _Change:
    """What `EngineCore._change` returns.

    No generator: one that a signal leaves between its two ends is closed whenever somebody drops
    the traceback, and would then undo what another thread is doing.
    """

    __slots__ = ("_core", "_refusals")

    def __init__(self, core: EngineCore, refusals: tuple[type[Exception], ...]) -> None:
        self._core = core
        self._refusals = refusals

    def __enter__(self) -> None:
        self._core.recover()
        self._core.scheduler.begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, self._refusals):
            self._core.scheduler.commit()
        else:
            self._core.recover()


class EngineCore:
    """Scheduler plus executor.

    Args:
        config: As given by the user; resolved here.
        executor: Runs the batches: one that is made already, or the name of a row of `EXECUTORS`.
        clock: Monotonic time.
        progress: Called with (phase, done, total) while loading.
        announce: Called with (tokens, requests, attended tokens) of each batch before it is
            computed.

    Raises:
        StartupError: the configuration, the model folder or the memory does not allow a start.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        executor: Executor | str = "inline",
        clock: Clock | None = None,
        progress: ProgressCallback | None = None,
        announce: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self.clock = clock or RealClock()
        started = self.clock.now()
        shape = config.model.read_shape()
        self.config, self.decisions = config.resolve(shape)
        for decision in self.decisions:
            logger.info("%s = %s (%s)", decision.what, decision.chose, decision.why)
        check_wanted()
        policy_class(self.config.scheduler)  # a bad one is refused before the model is loaded
        with paused_collector():
            if isinstance(executor, str):
                executor = make_executor(self.config, shape, executor)
            self.executor = executor
            self.info = self.executor.start(progress)
        self.scheduler = build_scheduler(
            self.config,
            self.info,
            self.clock,
            max_in_flight=self.executor.max_concurrent_batches,
        )
        self.kv = self.scheduler.kv
        self._max_in_flight = self.executor.max_concurrent_batches
        self._in_flight: deque[_Submitted] = deque()
        # batches whose result was not asked for, oldest first
        self._announce = announce
        self._watch = StarvationWatch()
        self._memory = MemoryPressure()
        self._shed = 0
        # blocks whose content memory pressure has cost since the last step
        self._audit_after = -math.inf
        self._to_audit: Iterator[None] | None = None
        # what is left of a look at the books that has begun
        self._unaudited = self._found_wrong = 0
        # steps since the last look at the books; mismatches that no statistics have told yet
        logger.info("engine core ready after %.2f s", self.clock.now() - started)

    # ---- the loop ----------------------------------------------------------------------------

    def step(self) -> Produced:
        """One turn: pick the tokens, compute them, apply the results.

        If the executor takes several batches at once, as many are picked as there are tokens for,
        and the results of the oldest are applied.

        A step that is left by an exception, whatever it is and wherever it comes from, has not
        happened: requests, blocks and cache are as before, and the next step may try again.
        """
        produced = self.step_into(_as_they_are)
        self.look_after()
        return produced

    def step_into(self, take: Callable[[list[EngineCoreOutput], StepStats], T]) -> T:
        """`step`, and what it produced is handed on within it: if `take` raises, the step has not
        happened either, so no token is lost on the way out. Call `look_after` afterwards.

        Returns:
            What `take` made of the outputs and statistics.
        """
        with self._change():
            outputs, stats = self._step()
            taken = take(outputs, stats)
        self._found_wrong = self._shed = 0  # they are told
        self._unaudited += 1
        return taken

    def look_after(self) -> None:
        """What is due from time to time after a step: to check some of the books, and to see
        whether memory runs short. No token is to wait for it, so send them first."""
        idle = not self.scheduler.requests
        if idle and self.kv.usage:
            self._to_audit = None  # blocks are held for nobody, which is what is looked at first
        if idle or self._unaudited >= AUDIT_STEPS:
            self._unaudited = 0
            if self.clock.now() >= self._audit_after:
                self._audit(AUDIT_SECONDS)
        if self._memory.is_due(now := self.clock.now()) and not self._in_flight:
            self._save_memory(now)

    def _step(self) -> Produced:
        start = self.clock.now()
        self._watch.begin(start)
        if not self._in_flight:
            self._submit()
        while len(self._in_flight) < self._max_in_flight and self.scheduler.can_fill:
            self._submit()
        oldest = self._in_flight.popleft()
        result = oldest.pending.result()
        executed = self.clock.now()
        outputs = self.scheduler.update(oldest.batch, result)
        stats = self.scheduler.make_stats(oldest.batch, result, outputs)
        if self.scheduler.is_in_doubt:
            self._forget_flights()
            self.scheduler.take_back()
        end = self.clock.now()
        stats.num_integrity_failures = self._found_wrong
        stats.num_shed_blocks = self._shed
        stats.num_attended_tokens = oldest.attended
        # From when the scheduler began: before that the core may have had no processor.
        stats.schedule_seconds = oldest.scheduled - stats.start
        stats.update_seconds = end - executed
        stats.step_seconds = end - stats.start
        self._watch.end(stats, end)
        return outputs, stats

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammar is compiled. If there is nothing else to do, wait a
        moment for one, so that the loop does not turn idly."""
        scheduler = self.scheduler
        scheduler.queue_compiled(self._is_compiled)
        idle = not (scheduler.running or scheduler.waiting or self._in_flight)
        if idle and scheduler.compiling:
            self.executor.wait_for_grammars(GRAMMAR_WAIT)
            scheduler.queue_compiled(self._is_compiled)

    def _is_compiled(self, request: Request) -> bool:
        return self.executor.compile_grammar(request.sampling_params)

    def _submit(self) -> None:
        if self.scheduler.compiling:
            self._queue_compiled()
        batch = self.scheduler.schedule()
        scheduled = self.clock.now()
        attended = batch.num_attended_tokens
        if self._announce is not None:
            tokens, rows = batch.total_num_scheduled_tokens, len(batch.num_scheduled_tokens)
            self._announce(tokens, rows, attended)
        pending = self.executor.submit(batch)
        self._in_flight.append(_Submitted(batch, pending, attended, scheduled))

    @property
    def has_requests(self) -> bool:
        """Whether `step()` has anything to do."""
        scheduler = self.scheduler
        return scheduler.has_requests or scheduler.is_changing or self._found_wrong > 0

    def _change(self, refusals: tuple[type[Exception], ...] = ()) -> _Change:
        """Everything inside the `with` happens, or none of it.

        Args:
            refusals: Raised before anything was changed, so that nothing need be undone.
        """
        return _Change(self, refusals)

    def recover(self) -> None:
        """Take back what was left half done, if anything was, and everything in flight with it. A
        second Ctrl-C may interrupt even this: whoever comes next does it again."""
        if self.scheduler.is_changing:
            self._forget_flights()
            self.scheduler.undo()

    def _forget_flights(self) -> None:
        self.executor.reset()
        self._in_flight.clear()

    def _audit(self, seconds: float = math.inf) -> None:
        """Go on checking the books: when the engine becomes idle, so that a leak shows soon, while
        it works, and when it shuts down. Books that are wrong are made anew.

        Not all at once and not every time: those of a large pool take tens of milliseconds, and
        the next step would wait for that.

        Args:
            seconds: After which the rest is put off.
        """
        start = self.clock.now()
        if self._to_audit is None or seconds == math.inf:
            self._to_audit = self.scheduler.integrity_parts()
        try:
            for _ in self._to_audit:
                if self.clock.now() - start >= seconds:
                    break
            else:
                self._to_audit = None
        except Exception as error:  # books that are wrong may raise anything when they are read
            self._to_audit = None
            self._repair(error)
        end = self.clock.now()
        self._audit_after = end + (end - start) / AUDIT_SHARE

    def _save_memory(self, now: float) -> None:
        """If the machine's memory runs short, the prefix cache goes, as far as nobody holds it:
        what was in it can be computed again, and a process that the kernel ends takes longer to
        replace."""
        left = self._memory.look(now)
        if left is None:
            return
        pool = self.kv.block_pool
        try:
            with self._change():
                dropped = self.scheduler.drop_free_content()
            self._shed += dropped
            given = self.executor.release_memory(pool.free_ids())
        except Exception as error:  # the step has happened, whatever becomes of this
            pass_on_signals(error)
            logger.exception("memory runs short, and none could be given back")
            return
        logger.warning(
            "only %s of memory are left: dropped the cached content of %d KV blocks that no "
            "request held; up to %s went back to the system",
            human_bytes(left),
            dropped,
            human_bytes(given),
        )

    def _repair(self, error: Exception) -> None:
        """Say what is wrong with the books and make them anew. Outputs stay the same: all requests
        keep their tokens, and whoever ran is computed again.

        Raises:
            Exception: they are still wrong. A new core is the only remedy.
        """
        self._found_wrong += 1
        logger.error("integrity check failed, please report this: %s", error or repr(error))
        try:
            logger.error("the books: %s", json.dumps(self.scheduler.describe()))
        except Exception:
            logger.exception("the books cannot even be read")
        self._forget_flights()
        self.scheduler.rebuild()
        self.scheduler.check_integrity()

    # ---- requests ----------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request that has passed the input gate.

        Raises:
            ProcessorRefused: a logits processor does not take it.
            ProcessorFailed: one fails on it.
        """
        if self.config.model.logits_processors and not request.output_token_ids:
            self.executor.check_processors(request.sampling_params)
        queued = Request(
            request.request_id,
            request.prompt_token_ids,
            request.sampling_params,
            arrival_time=request.arrival_time,
            priority=request.priority,
            cache_salt=request.cache_salt,
            output_token_ids=request.output_token_ids,
            client=request.client,
            pooling_params=request.pooling_params,
        )
        if queued.sampling_params.grammar is not None and not self._is_compiled(queued):
            queued.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        with self._change():
            self.scheduler.add_request(queued)

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests; unknown ids are ignored."""
        if request_ids:
            with self._change():
                self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def fail_request(self, request_id: str, reason: str) -> EngineCoreOutput | None:
        """End a request that cannot be computed.

        Returns:
            Its last output, with `reason` as its error; `None` if the id is unknown.
        """
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return None
        try:
            with self._change():
                self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ERROR)
        except Exception:
            # Ending it may be what fails. Undoing that ends it as well: it does not come back.
            if self.scheduler.is_changing or request_id in self.scheduler.requests:
                raise
            logger.exception("request %s could only be ended by undoing", request_id)
        return failed_output(request_id, reason)

    def keep_only(self, keep: Container[str] | None) -> None:
        """Leave all other requests out of the steps that follow; `None` brings them all back."""
        self.recover()
        self._forget_flights()
        self.scheduler.keep_only(keep)

    # ---- control verbs -----------------------------------------------------------------------

    def call(self, verb: str, args: dict[str, Any]) -> Any:
        """Run a control verb by name.

        Raises:
            InvalidRequest: there is no such verb, or its arguments do not fit.
            QuireError: it failed; nothing has changed.
        """
        asked = find_verb(verb)
        with self._change(refusals=(QuireError,)):
            return asked(self, args)

    def shutdown(self) -> None:
        """Check the books once more, then release the model."""
        with suppress(Exception):  # which is logged, and there is nobody left to repair them for
            self._audit()
        self.executor.shutdown()
