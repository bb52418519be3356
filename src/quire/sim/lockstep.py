"""Runs a recording step by step: every request comes in before the same step, every step takes the
recorded time, and the real scheduler decides anew.

Its decisions are compared with the recorded ones, record by record. Along the way this tells what
was in each step, which is what a model of step times is fitted to. Knows no model and no text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from quire.config import EngineConfig
from quire.core.facts import Fact, FactKind, Wait, unpack
from quire.core.request import RequestStatus
from quire.errors import ConfigError
from quire.sim.sequences import Sequences
from quire.sim.simulator import Pool, Simulator
from quire.sim.step_time import Overheads, StepShape, StepTimeModel, shape_of
from quire.workload.recorder import ABORT, UNFINISHED
from quire.workload.trace import Trace, TraceRequest, TraceStep

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

    @property
    def is_same(self) -> bool:
        """Whether all decisions are the recorded ones."""
        return self.decided == self.expected


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


class Lockstep:
    """Runs a recording again.

    Args:
        trace: With steps, from the start of the engine.
        config: Resolved; as it was recorded, for the same decisions.
        pool: The KV cache.

    Raises:
        ConfigError: the trace has no steps, or does not begin with the engine's first.
    """

    def __init__(self, trace: Trace, config: EngineConfig, pool: Pool) -> None:
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
        self._steps = trace.steps
        self._known = {request.number: request for request in trace.requests if request.number}
        self._sequences = Sequences(trace.requests, trace.header.block_size)
        self.simulator = Simulator(config, pool, _NO_TIMES)
        self._names: dict[int, str] = {}
        self._compiling: set[int] = set()

    def __iter__(self) -> Iterator[Replayed]:
        simulator = self.simulator
        scheduler = simulator.scheduler
        for recorded in self._steps:
            facts = list(unpack(recorded.facts))
            before = next((i for i, f in enumerate(facts) if f.kind == FactKind.STEP), len(facts))
            self._compiling = {
                f.request for f in facts if f.kind == FactKind.WAITS and f.reason == Wait.GRAMMAR
            }
            for fact in facts[:before]:
                self._happen(fact)
            self._set_clock(recorded.start)
            batch = scheduler.schedule()
            shape = shape_of(batch)
            result = simulator.executor.run(batch)
            result.forward_seconds, result.swap_seconds = recorded.forward, recorded.swap
            self._set_clock(recorded.start + recorded.seconds)
            outputs = scheduler.update(batch, result)
            records = scheduler.facts.take()[0]
            for output in outputs:
                if output.finish_reason is not None:
                    del simulator.executor.live[output.request_id]
            yield Replayed(recorded, shape, decisions(records), decisions(recorded.facts))

    def _set_clock(self, time: float) -> None:
        clock = self.simulator.clock
        clock.advance(max(0.0, time - clock.now()))

    def _happen(self, fact: Fact) -> None:
        """What happened between two steps happens again."""
        scheduler = self.simulator.scheduler
        if fact.kind == FactKind.QUEUED:
            self._set_clock(fact.time)
            self._add(fact)
        elif fact.kind == FactKind.FINISHED:
            name = self._names[fact.request]
            scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            self.simulator.executor.live.pop(name, None)
        elif fact.kind == FactKind.LIMITS:
            scheduler.set_limits(max_num_seqs=fact.a, max_num_batched_tokens=fact.b)
        elif fact.kind == FactKind.WAITS and fact.reason == Wait.COMPILED:
            name = self._names[fact.request]
            scheduler.queue_compiled(lambda request: request.request_id == name)

    def _add(self, fact: Fact) -> None:
        known = self._known.get(fact.request)
        # One that had not ended when the recording did has no line of its own.
        traced = known or TraceRequest(fact.time, max(1, fact.a), 0, number=fact.request)
        self._names[fact.request] = f"{fact.request:09}"
        waiting = RequestStatus.WAITING
        if fact.request in self._compiling:
            waiting = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        # Where its end is not for its length, it is among the recorded events.
        endless = known is None or traced.finish in (ABORT, UNFINISHED)
        name = self._names[fact.request]
        self.simulator.add(traced, self._sequences, name, waiting, endless=endless)


def measured(trace: Trace, config: EngineConfig, pool: Pool) -> tuple[list[StepShape], list[float]]:
    """What was in each recorded step, and how long it took."""
    shapes, seconds = [], []
    for step in Lockstep(trace, config, pool):
        shapes.append(step.shape)
        seconds.append(step.recorded.seconds)
    return shapes, seconds


def measured_overheads(steps: list[TraceStep], shapes: list[StepShape]) -> Overheads:
    """Pauses between the steps of a busy engine: the median, so that those in which nothing was to
    do do not count."""
    pauses = sorted(
        after.start - before.start - before.seconds
        for before, after, shape in zip(steps, steps[1:], shapes, strict=False)
        if shape.tokens
    )
    return Overheads(gap=max(0.0, pauses[len(pauses) // 2]) if pauses else 0.0)
