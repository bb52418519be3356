"""The fan-out shields the engine; the hit rate forgets old lookups."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from quire.core.stats import IterationStats, StepStats
from quire.observability.sinks import HitRate, StatSinks


class Good:
    def __init__(self) -> None:
        self.seen: list[tuple[StepStats | None, IterationStats | None]] = []

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        self.seen.append((step, iteration))


class Bad:
    calls = 0

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        self.calls += 1
        raise RuntimeError("full disk")


class Timed(Good):
    ticks = 0

    def tick(self) -> None:
        self.ticks += 1


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def log() -> Iterator[_Records]:
    handler, logger = _Records(), logging.getLogger("quire")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_a_bad_sink_is_logged_once_and_harms_nobody(log: _Records) -> None:
    bad, good = Bad(), Good()
    sinks = StatSinks([bad, good])
    for step in range(3):
        sinks.record(StepStats(step=step), None)
    assert [step.step for step, _ in good.seen if step] == [0, 1, 2]
    assert bad.calls == 3, "it may recover"
    assert len(log.records) == 1
    assert "Bad" in log.records[0].getMessage()


def test_two_bad_sinks_are_two_messages(log: _Records) -> None:
    sinks = StatSinks([Bad(), Bad()])
    sinks.record(None, None)
    sinks.record(None, None)
    assert len(log.records) == 2


def test_only_timed_sinks_are_woken() -> None:
    timed = Timed()
    sinks = StatSinks([Good(), Bad()])
    sinks.add(timed)
    sinks.tick()
    assert timed.ticks == 1 and len(sinks) == 3


def test_hit_rate_covers_the_last_requests() -> None:
    rate = HitRate(lookups=3)
    assert rate.value == 0
    rate.extend([(10, 10)])
    rate.extend([])
    assert rate.value == 1
    rate.extend([(10, 0), (20, 0)])
    assert rate.value == 0.25
    rate.extend([(10, 0)])
    assert rate.value == 0, "the hit has left the window"
    rate.extend([(1, 1)] * 4)
    assert rate.value == 1, "a step may admit more than the window holds"
