"""From facts to spans: follows requests through the steps and returns spans once they are complete.

It is given, in order, requests as they are accepted, statistics of steps, and the ends that the
frontend sees. A request's spans come out once both the frontend and the core are done with it, a
step's at once. Has no thread of its own and reads no clock.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from quire.core.facts import Fact, FactKind, Follower, Loss, unpack
from quire.core.request import RequestStatus
from quire.core.stats import FinishedRequestStats, StepStats
from quire.observability.traces.decode_runs import NEIGHBOURS, Mark, quantile_of_others
from quire.observability.traces.request_spans import CompletionTrace, RequestTrace
from quire.observability.traces.spans import (
    Attributes,
    RemoteParent,
    Span,
    SpanId,
    is_chosen,
    new_span_id,
    new_trace_id,
)
from quire.observability.traces.step_spans import step_spans

GRACE: Final = 2.0
"""Seconds for which an ended request waits for the core to report its end."""
REMEMBERED_STEPS: Final = 100_000
"""Number of exported steps that links can still point to."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request that the frontend has accepted or refused."""

    external_id: str
    internal_ids: tuple[str, ...]
    arrival: float
    attributes: Attributes
    parent: RemoteParent | None = None


class TraceBuilder:
    """Turns facts into spans.

    Args:
        decode_steps: `all`, `slow` or `none`: which decode steps get spans of their own.
        sampling_rate: Share of the requests without a caller's trace that are traced.
    """

    def __init__(self, decode_steps: str = "all", sampling_rate: float = 1.0) -> None:
        self._mode = decode_steps
        self._rate = sampling_rate
        self._requests: dict[str, RequestTrace] = {}
        """By internal id, while they are open."""
        self._ended: deque[RequestTrace] = deque()
        """Ended for the frontend; the core has not said so yet."""
        self._steps = _StepMemory()
        self.begin_core()

    def begin_core(self) -> list[Span]:
        """Each engine core numbers its requests and steps from the beginning. This completes no
        span."""
        self._follower = Follower()
        self._names: dict[int, str] = {}
        self._tracked: dict[int, CompletionTrace] = {}
        self._steps.new_core()
        return []

    # ---- requests ----------------------------------------------------------------------------

    def accept(self, request: TracedRequest) -> list[Span]:
        """Begin a trace if the request is sampled for one. This completes no span."""
        trace = self._begin(request)
        if trace is None:
            return []
        for index, internal in enumerate(request.internal_ids):
            trace.completions[internal] = CompletionTrace(index, request.arrival)
            self._requests[internal] = trace
        return []

    def refuse(self, request: TracedRequest, now: float, error: tuple[str, str]) -> list[Span]:
        """The trace of a refused request. `error` is its type and text."""
        trace = self._begin(request)
        if trace is None:
            return []
        trace.ended_at, trace.error = now, error
        return list(trace.spans(self._mode, self._steps.find))

    def _begin(self, request: TracedRequest) -> RequestTrace | None:
        parent = request.parent
        trace = RequestTrace(request.external_id, request.arrival, request.attributes, parent)
        chosen = parent.sampled if parent else is_chosen(trace.id.trace_id, self._rate)
        return trace if chosen else None

    def end(self, ended: Iterable[FinishedRequestStats]) -> list[Span]:
        """Completions that have ended for the frontend."""
        spans: list[Span] = []
        for stats in ended:
            trace = self._requests.get(stats.request_id)
            if trace is None:
                continue
            trace.completions[stats.request_id].ended = stats
            if all(completion.ended for completion in trace.completions.values()):
                trace.ended_at = stats.finished_ts
                self._ended.append(trace)
                spans += self.complete(stats.finished_ts)
        return spans

    def end_all(self, now: float, error: tuple[str, str] | None = None) -> list[Span]:
        """End all open traces now, because the engine ends. `error` is its type and text."""
        open_traces = {id(t): t for t in self._requests.values() if t.ended_at is None}
        for trace in open_traces.values():
            trace.ended_at, trace.error = now, error
            self._ended.append(trace)
        return self.complete(now + 2 * GRACE)

    def complete(self, now: float) -> list[Span]:
        """Spans of ended requests that the core has finished with, too."""
        waiting, self._ended = self._ended, deque()
        spans: list[Span] = []
        for trace in waiting:
            assert trace.ended_at is not None, "it is in the list of ended ones"
            done = all(completion.core_done for completion in trace.completions.values())
            if not done and now < trace.ended_at + GRACE:
                self._ended.append(trace)
                continue
            for internal in trace.completions:
                del self._requests[internal]
            spans += trace.spans(self._mode, self._steps.find)
        return spans

    # ---- steps -------------------------------------------------------------------------------

    def step(self, step: StepStats) -> list[Span]:
        """Spans that this step completes: its own, and those of ended requests."""
        self._names.update(step.names)
        facts = list(unpack(step.facts))
        scheduled = self._follower.follow(step.facts)
        for fact in facts:
            self._before_work(fact)
        self._work(step, facts, scheduled)
        spans = self._own_spans(step, facts, scheduled)
        for fact in facts:
            self._after_work(fact)
        return spans + self.complete(step.start + step.step_seconds)

    def _before_work(self, fact: Fact) -> None:
        """What was decided before the step ran."""
        if fact.kind == FactKind.QUEUED:
            name = self._names.get(fact.request, "")
            trace = self._requests.get(name)
            if trace is not None:
                self._tracked[fact.request] = trace.completions[name]
        completion = self._tracked.get(fact.request)
        if completion is None:
            return
        if fact.kind == FactKind.QUEUED:
            completion.queued(fact)
        elif fact.kind == FactKind.WAITS:
            completion.waits(fact)
        elif fact.kind == FactKind.ADMITTED:
            completion.admitted(fact)
        elif fact.kind == FactKind.PREEMPTED and fact.reason != Loss.FAILURE:
            completion.preempted(fact, self._external(fact.other))

    def _work(self, step: StepStats, facts: list[Fact], scheduled: dict[int, int]) -> None:
        right = {fact.request: fact.b for fact in facts if fact.kind == FactKind.VERIFIED}
        lost = {fact.request for fact in facts if _is_lost(fact)}
        end = step.start + step.step_seconds
        mark = Mark(step.step, end, len(scheduled))
        for number, count in scheduled.items():
            completion = self._tracked.get(number)
            if completion is not None:
                kept = number not in lost
                drafts = right.get(number, 0)
                completion.worked(mark, count, drafts, kept)
                if step.layer_times:
                    completion.forward_seconds += step.forward_seconds
                completion.execute_seconds += step.worker_seconds
        reason = next((f.reason for f in facts if f.kind == FactKind.STALLED), 0)
        for number, completion in self._tracked.items():
            if number in self._follower.running and number not in scheduled:
                completion.stalled(step.step, end, reason)

    def _after_work(self, fact: Fact) -> None:
        """What the step's results meant."""
        completion = self._tracked.get(fact.request)
        if fact.kind == FactKind.FINISHED:
            self._names.pop(fact.request, None)
            self._tracked.pop(fact.request, None)
            if completion is not None:
                completion.core_done = True
        elif (
            completion is not None
            and fact.kind == FactKind.PREEMPTED
            and fact.reason == Loss.FAILURE
        ):
            completion.preempted(fact, None)

    def _external(self, number: int) -> str | None:
        """The caller's id of a request."""
        name = self._names.get(number)
        trace = self._requests.get(name) if name else None
        return trace.external_id if trace else name

    def _own_spans(
        self, step: StepStats, facts: list[Fact], scheduled: dict[int, int]
    ) -> list[Span]:
        roots = self._roots(scheduled)
        preempted = [f for f in facts if f.kind == FactKind.PREEMPTED]
        slow = self._steps.is_slow(step.step_seconds)
        decides = step.num_prefills or preempted or any(f.kind == FactKind.FINISHED for f in facts)
        wanted = self._mode == "all" or decides or (slow and self._mode == "slow")
        if not roots or not wanted:
            return []
        identity = self._steps.add(step.step)
        named = [(fact, self._external(fact.request) or "") for fact in preempted]
        return list(step_spans(step, identity, roots, named))

    def _roots(self, scheduled: dict[int, int]) -> list[SpanId]:
        """Root spans of the traced requests in a batch, without repetition."""
        found: dict[SpanId, None] = {}
        for number in scheduled:
            if number in self._tracked:
                trace = self._requests.get(self._names.get(number, ""))
                if trace is not None:
                    found[trace.id] = None
        return list(found)


def _is_lost(fact: Fact) -> bool:
    """Whether the step gave the request no token, because the request failed or is a pooling
    one."""
    if fact.kind == FactKind.PREEMPTED:
        return fact.reason == Loss.FAILURE
    failed = fact.reason == RequestStatus.FINISHED_ERROR
    return fact.kind == FactKind.FINISHED and (failed or fact.a == 0)


class _StepMemory:
    """Ids of exported steps, and how long steps took lately."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []
        self._ids: dict[int, SpanId] = {}

    def new_core(self) -> None:
        """Steps are numbered from 1 again; links to the old ones have been made by now."""
        self._ids.clear()

    def add(self, step: int) -> SpanId:
        """The id of a step that is exported."""
        identity = self._ids[step] = SpanId(new_trace_id(), new_span_id())
        if len(self._ids) > REMEMBERED_STEPS:
            del self._ids[next(iter(self._ids))]
        return identity

    def find(self, step: int) -> SpanId | None:
        """The id of a step, if it was exported."""
        return self._ids.get(step)

    def is_slow(self, seconds: float) -> bool:
        """Whether this step took longer than 95 % of the steps just before it. Adds it to them."""
        ordered = self._ordered
        slow = len(ordered) > 1 and seconds > quantile_of_others([*ordered, seconds])
        insort(ordered, seconds)
        self._recent.append(seconds)
        if len(self._recent) > NEIGHBOURS:
            ordered.remove(self._recent.popleft())
        return slow
