"""The tracer: takes facts on the engine's thread, builds and sends spans on two threads of its own.

The engine's thread only appends to a queue. One thread builds spans in batches and another sends
them, so that an endpoint that hangs holds up neither the engine nor the building. Spans that cannot
be sent are dropped and counted, with one warning. Knows no OpenTelemetry: it is given an exporter.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from quire.core.stats import FinishedRequestStats, IterationStats, StepStats
from quire.logger import get_logger
from quire.observability.traces.builder import TraceBuilder, TracedRequest
from quire.observability.traces.spans import (
    Attributes,
    Span,
    SpanId,
    child_of,
    new_span_id,
    new_trace_id,
)
from quire.utils.timing import Clock

logger = get_logger(__name__)

MAX_QUEUED_SPANS: Final = 32_768
"""Largest number of spans waiting for the endpoint; further ones are dropped."""
BATCH: Final = 2048
"""Spans in one message: some 400 KB, a tenth of what collectors take by default."""
PERIOD: Final = 0.25
"""Seconds between two rounds of building."""
SLICE: Final = 64
"""Number of facts processed before other threads get a turn."""
CLOSE_SECONDS: Final = 1.5
"""Seconds that the last spans have to be sent."""


class SpanExporter(Protocol):
    """Sends spans somewhere."""

    def export(self, spans: Sequence[Span]) -> bool:
        """Send spans; False if that failed. May block for seconds."""
        ...

    def finished(self, ended: FinishedRequestStats) -> None:
        """Count a completion in the metrics, if metrics are sent as well."""
        ...

    def close(self) -> None:
        """Stop at once."""
        ...


class Tracer:
    """Turns facts into spans. A `StatSink` with hooks for requests.

    Args:
        exporter: Where spans go.
        builder: Makes them.
        on_dropped: Called with the number of spans lost.
        clock: The clock that the facts were taken with.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        builder: TraceBuilder,
        on_dropped: Callable[[int], None],
        clock: Clock,
    ) -> None:
        self._exporter = exporter
        self._clock = clock
        self._builder = builder
        self._on_dropped = on_dropped
        self._inbox: deque[Callable[[], Sequence[Span]]] = deque()
        self._outbox: deque[Span] = deque()
        self._arrived = threading.Event()
        self._filled = threading.Event()
        self._closing = False
        self._warned = False
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("trace-builder", self._build), ("trace-sender", self._send))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    # ---- the engine's side: appends, nothing else ---------------------------------------------

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """Take the facts of one step."""
        ended = iteration.finished if iteration is not None else ()
        if step is not None or ended:
            # `append` and `popleft` of a deque are atomic, so neither side needs a lock.
            self._inbox.append(lambda: self._take(step, ended))

    def begin_core(self, epoch: int) -> None:
        """What comes from now on is of another engine core."""
        self._inbox.append(self._builder.begin_core)

    def accept(self, request: TracedRequest) -> None:
        """A request was accepted. Call this before the core gets it."""
        self._inbox.append(lambda: self._builder.accept(request))

    def refuse(self, request: TracedRequest, now: float, error: BaseException) -> None:
        """A request was refused."""
        told = (type(error).__name__, str(error))
        self._inbox.append(lambda: self._builder.refuse(request, now, told))

    def end_all(self, now: float, error: BaseException) -> None:
        """The engine has ended, and every open request with it."""
        told = (type(error).__name__, str(error))
        self._inbox.append(lambda: self._builder.end_all(now, told))

    def started(self, phases: Sequence[tuple[str, float, float]], about: Attributes) -> None:
        """The engine is ready. `phases`: name, start and end of each."""
        self._inbox.append(lambda: startup_spans(phases, about))

    def close(self) -> None:
        """Send what is left, for a short while, and end the threads."""
        if self._closing:
            return
        self._closing = True
        atexit.unregister(self.close)
        deadline = time.monotonic() + CLOSE_SECONDS
        self._arrived.set()
        self._threads[0].join(CLOSE_SECONDS)
        self._filled.set()
        self._threads[1].join(max(0.1, deadline - time.monotonic()))
        self._exporter.close()
        self._drop(len(self._outbox))

    # ---- building ----------------------------------------------------------------------------

    def _take(
        self, step: StepStats | None, ended: Sequence[FinishedRequestStats]
    ) -> Sequence[Span]:
        spans: list[Span] = []
        if step is not None:
            spans += self._builder.step(step)
        if ended:
            spans += self._builder.end(ended)
            for stats in ended:
                self._exporter.finished(stats)
        return spans

    def _build(self) -> None:
        while not self._closing:
            self._arrived.wait(PERIOD)
            self._drain()
            self._put(self._guarded(lambda: self._builder.complete(self._clock.now())))
        self._drain()
        # At the end nobody waits for the core's last word any more.
        self._put(self._guarded(lambda: self._builder.complete(float("inf"))))

    def _drain(self) -> None:
        while self._inbox:
            for _ in range(min(SLICE, len(self._inbox))):
                self._put(self._guarded(self._inbox.popleft()))
            if not self._closing:
                # Building is pure Python and would keep the interpreter's lock for long stretches;
                # sleeping lets the event loop run.
                time.sleep(0.001)

    def _guarded(self, work: Callable[[], Sequence[Span]]) -> Sequence[Span]:
        try:
            return work()
        except Exception:
            if not self._warned:
                self._warned = True
                logger.exception("facts could not be made into spans; further cases are not logged")
            return ()

    def _put(self, spans: Sequence[Span]) -> None:
        if not spans:
            return
        room = MAX_QUEUED_SPANS - len(self._outbox)
        self._outbox.extend(spans[:room])
        self._drop(len(spans) - room)
        self._filled.set()

    # ---- sending -----------------------------------------------------------------------------

    def _send(self) -> None:
        while True:
            if not self._outbox:
                if self._closing and not self._threads[0].is_alive():
                    return
                self._filled.wait(PERIOD)
                self._filled.clear()
                continue
            batch = [self._outbox.popleft() for _ in range(min(BATCH, len(self._outbox)))]
            if not self._export(batch):
                self._drop(len(batch))

    def _export(self, batch: Sequence[Span]) -> bool:
        try:
            return self._exporter.export(batch)
        except Exception as error:
            logger.debug("spans could not be sent", exc_info=error)
            return False

    def _drop(self, count: int) -> None:
        if count <= 0:
            return
        self._on_dropped(count)
        if not self._warned:
            self._warned = True
            logger.warning(
                "spans are dropped: --otlp-traces-endpoint does not take them; serving goes on, "
                "and quire:trace_spans_dropped_total counts them. This is said once."
            )


def startup_spans(phases: Sequence[tuple[str, float, float]], about: Attributes) -> Sequence[Span]:
    """`startup` and its phases."""
    if not phases:
        return ()
    root = SpanId(new_trace_id(), new_span_id())
    spans = [Span("startup", root, None, phases[0][1], phases[-1][2], about)]
    spans += [Span(name, child_of(root), root, start, end) for name, start, end in phases]
    return spans


class PhaseLog:
    """Notes when each phase of the start begins, which is when the previous one ends."""

    def __init__(self, now: float, first: str) -> None:
        self._begun: list[tuple[str, float]] = [("_".join(first.split()), now)]

    def enter(self, phase: str, now: float) -> None:
        """A phase begins, unless it has begun already."""
        name = "_".join(phase.lower().split())
        if self._begun[-1][0] != name:
            self._begun.append((name, now))

    def phases(self, now: float) -> list[tuple[str, float, float]]:
        """Name, start and end of each; the last ends now."""
        ends = [start for _, start in self._begun[1:]] + [now]
        return [(name, start, end) for (name, start), end in zip(self._begun, ends, strict=True)]
