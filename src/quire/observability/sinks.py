"""Where facts about steps go: the contract of a sink, and the fan-out that keeps a sink's failures
away from the engine.

Knows nothing of what a sink does with the facts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol, runtime_checkable

from quire.core.stats import IterationStats, StepStats
from quire.logger import get_logger
from quire.utils.signals import pass_on_signals

logger = get_logger(__name__)

HIT_RATE_LOOKUPS: Final = 1000
"""Number of most recent lookups that the prefix hit rate covers."""


class StatSink(Protocol):
    """Anything that wants the facts of every step."""

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """Take what one step did (`step`) and what it meant for callers (`iteration`).

        Called on the engine's own thread, so it must return within microseconds. Either may be
        None.
        """
        ...


@runtime_checkable
class TimedSink(Protocol):
    """A sink that also wants to be woken while no step runs."""

    def tick(self) -> None:
        """Do whatever is due by the clock."""
        ...


@runtime_checkable
class CoreSink(Protocol):
    """A sink that goes by numbers which each engine core counts from 1: of steps, of requests."""

    def begin_core(self, epoch: int) -> None:
        """What is recorded from now on comes from the core of this epoch."""
        ...


@runtime_checkable
class ClosingSink(Protocol):
    """A sink that has something to finish at the end."""

    def close(self) -> None:
        """Finish within two seconds. Safe to call twice."""
        ...


class StatSinks:
    """Hands every fact to every sink. If a sink raises, this is logged once and the sink stays."""

    def __init__(self, sinks: Iterable[StatSink] = ()) -> None:
        self._sinks: list[StatSink] = list(sinks)
        self._reported: set[int] = set()

    def add(self, sink: StatSink) -> None:
        """Hand all facts to one more sink from now on."""
        self._sinks.append(sink)

    def close(self) -> None:
        """Let sinks that write somewhere finish; never raises."""
        for sink in self._sinks:
            if isinstance(sink, ClosingSink):
                self._shield(sink, sink.close)

    def __len__(self) -> int:
        return len(self._sinks)

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """Hand over the facts of one step; never raises."""
        for sink in self._sinks:
            self._shield(sink, lambda sink=sink: sink.record(step, iteration))  # type: ignore[misc]

    def begin_core(self, epoch: int) -> None:
        """Tell the sinks that the next facts come from another engine core; never raises."""
        for sink in self._sinks:
            if isinstance(sink, CoreSink):
                self._shield(sink, lambda sink=sink: sink.begin_core(epoch))  # type: ignore[misc]

    def tick(self) -> None:
        """Wake the sinks that act by the clock; never raises."""
        for sink in self._sinks:
            if isinstance(sink, TimedSink):
                self._shield(sink, sink.tick)

    def _shield(self, sink: object, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            pass_on_signals(error)
            if id(sink) not in self._reported:
                self._reported.add(id(sink))
                logger.exception(
                    "statistics sink %s failed; its further failures are not logged",
                    type(sink).__name__,
                )


class HitRate:
    """Share of looked-up prefix tokens that were cached, over the most recent lookups."""

    def __init__(self, lookups: int = HIT_RATE_LOOKUPS) -> None:
        self._window: deque[tuple[int, int]] = deque()
        self._limit = lookups
        self._queries = 0
        self._hits = 0

    def extend(self, lookups: Iterable[tuple[int, int]]) -> None:
        """Count lookups: for each, the tokens looked up and the tokens found."""
        for queries, hits in lookups:
            self._window.append((queries, hits))
            self._queries += queries
            self._hits += hits
            if len(self._window) > self._limit:
                old_queries, old_hits = self._window.popleft()
                self._queries -= old_queries
                self._hits -= old_hits

    @property
    def value(self) -> float:
        """0 to 1; 0 before the first lookup."""
        return self._hits / self._queries if self._queries else 0.0
