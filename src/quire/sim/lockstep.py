"""Runs a recording step by step: every request comes in before the same step, every step takes the
recorded time, and the real scheduler decides anew.

Its decisions are compared with the recorded ones, record by record. Along the way this tells what
was in each step, which is what a model of step times is fitted to. Knows no model and no text.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from quire.config import EngineConfig
from quire.core.facts import Fact, FactKind, Wait, unpack
from quire.core.request import RequestStatus
from quire.errors import ConfigError
from quire.sim.sequences import Sequences
from quire.sim.simulator import Pool, Simulator
from quire.sim.step_time import Overheads, StepShape, StepTimeModel, fit, non_negative
from quire.workload.recorder import ABORT, UNFINISHED
from quire.workload.trace import Trace, TraceRequest, TraceStep

LONGEST_PAUSE: Final = 20.0
"""A pause counts as at most so many times the median, and as much for each request that came."""
_NO_TIMES = StepTimeModel(1.0, (0.0,) * 14)


class Decided(NamedTuple):
    """One record without its time."""

    kind: int
    reason: int
    step: int
    request: int
    other: int
    a: int
    b: int
    c: int
    d: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step that was run again."""

    recorded: TraceStep
    shape: StepShape
    decided: list[Decided]
    """What the scheduler decided now."""
    expected: list[Decided]
    """What it decided then."""
    is_busy: bool = False
    """Whether there is something left to do after it."""
    sent: float | None = None
    """When the first request that came between the step before and this one had been sent; `None`
    if none came. Seconds since the recording began."""
    arrivals: int = 0
    """Requests that came between the step before and this one."""

    @property
    def is_same(self) -> bool:
        """Whether all decisions are the recorded ones."""
        return self.decided == self.expected


def request_name(number: int) -> str:
    """The id of a request that is run again. In the order of numbers, because policies compare the
    ids of requests that came at the same time."""
    return f"{number:09}"


def decisions(records: bytes) -> list[Decided]:
    """The decisions in the records of a step.

    Why a request ended is left out: here it ends because it has its tokens, whatever ended it then.
    """
    found = []
    for fact in unpack(records):
        kind, reason, step, request, other, _, *numbers = fact
        if kind == FactKind.FINISHED:
            reason = 0
        found.append(Decided(kind, reason, step, request, other, *numbers))
    return found


class Driven(Protocol):
    """What a recording is run on."""

    @property
    def is_busy(self) -> bool:
        """Whether there are requests."""
        ...

    def set_clock(self, time: float) -> None:
        """It is `time` now, in seconds since the recording began, unless it is later already."""
        ...

    def add(
        self, traced: TraceRequest, name: str, arrived: Fact, *, endless: bool, compiling: bool
    ) -> None:
        """A request comes. `endless`: it ends by `finish` only. `compiling`: its grammar is not
        ready."""
        ...

    def finish(self, name: str) -> None:
        """It is ended from outside."""
        ...

    def compiled(self, name: str) -> None:
        """Its grammar is ready."""
        ...

    def set_limits(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Limits change."""
        ...

    def drop_cache(self, *, only_free: bool) -> None:
        """The prefix cache is emptied. `only_free`: of what no request holds."""
        ...

    def step(self, recorded: TraceStep) -> tuple[StepShape, bytes]:
        """Take a step; gives what was in it, and all records since the last."""
        ...


class SimulatedEngine:
    """The real scheduler, and nothing else.

    Args:
        trace: With its requests.
        config: Resolved.
        pool: The KV cache.
    """

    def __init__(self, trace: Trace, config: EngineConfig, pool: Pool) -> None:
        self._sequences = Sequences(trace.requests, trace.header.block_size)
        self._simulator = Simulator(config, pool, _NO_TIMES)
        self._scheduler = self._simulator.scheduler

    @property
    def is_busy(self) -> bool:
        """Whether there are requests."""
        return bool(self._scheduler.requests)

    def set_clock(self, time: float) -> None:
        """Set the clock ahead."""
        clock = self._simulator.clock
        clock.advance(max(0.0, time - clock.now()))

    def add(
        self, traced: TraceRequest, name: str, arrived: Fact, *, endless: bool, compiling: bool
    ) -> None:
        """Queue it."""
        status = RequestStatus.WAITING
        if compiling:
            status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self._simulator.add(
            traced, self._sequences, name, status, endless=endless, came_with=arrived.b
        )

    def finish(self, name: str) -> None:
        """Abort it."""
        self._scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self._simulator.executor.live.pop(name, None)

    def compiled(self, name: str) -> None:
        """It joins the queue."""
        self._scheduler.queue_compiled(lambda request: request.request_id == name)

    def set_limits(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Change them."""
        self._scheduler.set_limits(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )

    def drop_cache(self, *, only_free: bool) -> None:
        """Empty it."""
        scheduler = self._scheduler
        (scheduler.drop_free_content if only_free else scheduler.reset_prefix_cache)()

    def step(self, recorded: TraceStep) -> tuple[StepShape, bytes]:
        """Schedule, and apply what the trace says."""
        scheduler, executor = self._scheduler, self._simulator.executor
        batch = scheduler.schedule()
        result = executor.run(batch, {request_name(n): count for n, count in recorded.several})
        shape = self._simulator.succession.shape_of(
            batch, recorded.start, len(result.sampled_token_ids)
        )
        result.forward_seconds, result.swap_seconds = recorded.forward, recorded.swap
        self.set_clock(recorded.start + recorded.seconds)
        for output in scheduler.update(batch, result):
            if output.finish_reason is not None:
                del executor.live[output.request_id]
        if not scheduler.requests:
            self._simulator.succession.idle(recorded.start + recorded.seconds)
        return shape, scheduler.facts.take()[0]


class Lockstep:
    """Runs a recording again.

    Args:
        trace: With steps, from the start of the engine.
        engine: To run it on.

    Raises:
        ConfigError: the trace has no steps, or does not begin with the engine's first.
    """

    def __init__(self, trace: Trace, engine: Driven) -> None:
        if not trace.steps:
            raise ConfigError(
                "the trace has requests but no steps: record one with --record, or use `quire "
                "simulate`, which needs none"
            )
        if trace.steps[0].step != 1:
            raise ConfigError(
                f"the recorded steps begin with step {trace.steps[0].step}: only a recording from "
                "the engine's start on can be run again step by step"
            )
        self._steps, self._engine = trace.steps, engine
        self._known = {request.number: request for request in trace.requests if request.number}
        self._origin = trace.header.origin
        self._names: dict[int, str] = {}
        self._compiling: set[int] = set()

    def __iter__(self) -> Iterator[Replayed]:
        for recorded in self._steps:
            try:
                facts = list(unpack(recorded.facts))
            except ValueError as error:
                raise ConfigError(f"step {recorded.step} of the trace: {error}") from None
            before = next((i for i, f in enumerate(facts) if f.kind == FactKind.STEP), len(facts))
            self._compiling = {
                f.request for f in facts if f.kind == FactKind.WAITS and f.reason == Wait.GRAMMAR
            }
            for fact in facts[:before]:
                self._happen(fact)
            came = [self._known.get(f.request) for f in facts[:before] if f.kind == FactKind.QUEUED]
            sent = min((request.arrival for request in came if request), default=None)
            self._engine.set_clock(recorded.start)
            shape, records = self._engine.step(recorded)
            then, busy = decisions(recorded.facts), self._engine.is_busy
            yield Replayed(recorded, shape, decisions(records), then, busy, sent, len(came))

    def _happen(self, fact: Fact) -> None:
        """What happened between two steps happens again."""
        engine = self._engine
        if fact.kind == FactKind.QUEUED:
            self._add(fact)
        elif fact.kind == FactKind.FINISHED:
            engine.finish(self._names[fact.request])
        elif fact.kind == FactKind.LIMITS:
            engine.set_limits(fact.a, fact.b)
        elif fact.kind == FactKind.CACHE_DROPPED:
            engine.drop_cache(only_free=bool(fact.a))
        elif fact.kind == FactKind.WAITS and fact.reason == Wait.COMPILED:
            engine.compiled(self._names[fact.request])

    def _add(self, fact: Fact) -> None:
        self._engine.set_clock(fact.time - self._origin)
        known = self._known.get(fact.request)
        # One that had not ended when the recording did may have no line of its own.
        traced = known or TraceRequest(0.0, max(1, fact.a), fact.b, number=fact.request)
        name = self._names[fact.request] = request_name(fact.request)
        self._engine.add(
            traced,
            name,
            fact,
            # Where its end is not for its length, it is among the recorded events.
            endless=known is None or traced.finish in (ABORT, UNFINISHED),
            compiling=fact.request in self._compiling,
        )


def fit_recorded(
    trace: Trace, config: EngineConfig, pool: Pool, about: dict[str, Any] | None = None
) -> StepTimeModel:
    """A model of step times, fitted to the steps of a recording.

    Args:
        trace: With steps.
        config: As it was recorded.
        pool: As it was recorded.
        about: For the model.

    Raises:
        ConfigError: the steps are too few.
    """
    replayed = list(Lockstep(trace, SimulatedEngine(trace, config, pool)))
    shapes, seconds = [s.shape for s in replayed], [s.recorded.seconds for s in replayed]
    return fit(shapes, seconds, measured_overheads(replayed), about)


def measured_overheads(replayed: Sequence[Replayed]) -> Overheads:
    """The pauses between the steps of an engine that had something to do all the time: what fits
    best over the requests of the step before, its prompts and their tokens, and who came
    meanwhile."""
    import numpy

    pauses = [
        (
            max(0.0, after.recorded.start - before.recorded.start - before.recorded.seconds),
            before.shape,
            after.arrivals,
        )
        for before, after in itertools.pairwise(replayed)
        if before.shape.tokens and before.is_busy
    ]
    if not pauses:
        return Overheads()
    most = LONGEST_PAUSE * statistics.median(pause for pause, _, _ in pauses)
    taken = [min(pause, most * (1 + arrivals)) for pause, _, arrivals in pauses]
    values = [
        (
            1.0, shape.rows, min(shape.prefills, 1), came, max(0, shape.tokens - shape.rows),
            min(came, 1),
        )
        for _, shape, came in pauses
    ]  # fmt: skip
    gap, per_row, after_prompt, per_arrival, per_token, of_arrival = non_negative(
        numpy.array(values), numpy.array(taken)
    )
    return Overheads(
        gap=gap,
        gap_per_row=per_row,
        gap_after_prompt=after_prompt,
        gap_per_arrival=per_arrival,
        gap_per_prompt_token=per_token,
        gap_of_arrival=of_arrival,
    )


def rising(points: Sequence[tuple[Sequence[float], float]], most: float) -> list[float]:
    """What fits best: the seconds at 0, then how many more for one of each count, none below 0.

    Args:
        points: Counts of each, and the seconds it took.
        most: A point counts as at most so many times what fits all: the machine stands still for a
            moment now and then, which says nothing of other times.
    """
    import numpy

    values = numpy.array([(1.0, *counts) for counts, _ in points])
    taken = numpy.array([seconds for _, seconds in points])
    fitted = numpy.full(len(taken), statistics.median(taken))
    for _ in range(2):
        found = non_negative(values, numpy.minimum(taken, most * fitted))
        fitted = values @ numpy.array(found)
    return found
