"""The stat line: exact words, rates over real time, levels, preemptions."""

from __future__ import annotations

import logging

import pytest

from quire.core.stats import FinishedRequestStats, IterationStats, StepStats
from quire.observability.metrics.log_line import BatchSizeLog, IterationLog, LogLine
from quire.utils.timing import ManualClock


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def log(lines: Lines) -> logging.Logger:
    logger = logging.Logger("test", logging.DEBUG)
    logger.addHandler(lines)
    return logger


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


def test_exact_line(lines: Lines, log: logging.Logger, clock: ManualClock) -> None:
    sink = LogLine(10.0, "cpu", clock=clock, log=log)
    sink.record(
        StepStats(num_prompt_tokens=100, num_generation_tokens=1, prefix_queries=200,
                  prefix_hits=50, prefix_lookups=[(120, 50), (80, 0)], num_running=1), None,
    )  # fmt: skip
    assert lines.lines == []
    clock.advance(10)
    sink.record(
        StepStats(num_generation_tokens=4, num_running=3, num_waiting=2, kv_cache_usage=0.123),
        None,
    )
    assert lines.lines == [
        (
            "INFO",
            "Engine 000: Avg prompt throughput: 10.0 tokens/s, "
            "Avg generation throughput: 0.5 tokens/s, Running: 3 reqs, Waiting: 2 reqs, "
            "KV cache usage: 12.3%, Prefix cache hit rate: 25.0%, "
            "Swapped: 0 reqs, Pending: 2 reqs",
        )
    ]


def test_preemptions_are_those_of_the_interval(
    lines: Lines, log: logging.Logger, clock: ManualClock
) -> None:
    sink = LogLine(10.0, "cuda", engine=7, clock=clock, log=log)
    sink.record(StepStats(num_preempted=2, num_generation_tokens=1), None)
    clock.advance(5)
    sink.record(StepStats(num_preempted=1), None)
    clock.advance(5)
    sink.tick()
    clock.advance(10)
    sink.tick()
    first, second = (text for _, text in lines.lines)
    assert ", Waiting: 0 reqs, Preemptions: 3, GPU KV cache usage" in first
    assert first.startswith("Engine 007: ")
    assert "Preemptions" not in second, "they were reset after they were shown, not before"


def test_a_late_line_divides_by_the_time_that_passed(
    lines: Lines, log: logging.Logger, clock: ManualClock
) -> None:
    sink = LogLine(10.0, clock=clock, log=log)
    clock.advance(40)
    sink.record(StepStats(num_prompt_tokens=100), None)
    assert "prompt throughput: 2.5 tokens/s" in lines.lines[0][1]


def test_idle_intervals_are_at_debug(lines: Lines, log: logging.Logger, clock: ManualClock) -> None:
    sink = LogLine(1.0, clock=clock, log=log)
    sink.record(StepStats(num_generation_tokens=1, num_running=1), None)
    for _ in range(4):
        clock.advance(1)
        sink.tick()
        sink.tick()
    assert [level for level, _ in lines.lines] == ["INFO", "INFO", "DEBUG", "DEBUG"]
    assert "generation throughput: 0.0" in lines.lines[1][1]


def test_parts_that_only_show_when_used(
    lines: Lines, log: logging.Logger, clock: ManualClock
) -> None:
    sink = LogLine(10.0, clock=clock, log=log)
    corrupted = FinishedRequestStats("error", 1, 0, 1, 0, 1, 5, 1, 0, 0, 1, 16, corrupted=True)
    sink.record(
        StepStats(num_generation_tokens=6, num_drafts=4, num_draft_tokens=8, num_accepted_tokens=2),
        IterationStats(finished=[corrupted]),
    )
    for _ in range(2):
        clock.advance(10)
        sink.tick()
    first, second = (text for _, text in lines.lines)
    parts = "Corrupted: 1 reqs, Draft acceptance rate: 25.0%, Mean acceptance length: 1.50, Swapped"
    assert parts in first
    assert "Corrupted" not in second and "acceptance" not in second


def test_the_second_tier_has_its_own_field(
    lines: Lines, log: logging.Logger, clock: ManualClock
) -> None:
    sink = LogLine(10.0, clock=clock, log=log)
    sink.record(StepStats(num_swapped=3, swap_usage=0.25, kv_cache_usage=0.5), None)
    clock.advance(10)
    sink.tick()
    ((_, text),) = lines.lines
    assert "Waiting: 0 reqs, KV cache usage: 50.0%" in text
    assert "CPU KV cache usage: 25.0%, Swapped: 3 reqs, Pending: 0 reqs" in text


def test_per_step_line(lines: Lines, log: logging.Logger) -> None:
    sink = IterationLog("cpu", log)
    sink.record(None, None)
    sink.record(
        StepStats(step=5, num_prompt_tokens=7, num_scheduled_tokens=9, num_scheduled_requests=3,
                  num_prefills=1, num_running=3, num_waiting=1, step_seconds=0.0125,
                  kv_cache_usage=0.5), None,
    )  # fmt: skip
    assert lines.lines == [
        (
            "INFO",
            "Iteration(5): 1 context requests, 7 context tokens, 2 generation requests, "
            "2 generation tokens, iteration elapsed time: 12.50 ms, KV cache usage: 50.0%, "
            "3 running requests, 1 waiting requests",
        )
    ]


def test_batch_sizes(lines: Lines, log: logging.Logger, clock: ManualClock) -> None:
    sink = BatchSizeLog(1.0, clock, log)
    for size, seconds in [(4, 0.002), (4, 0.004), (1, 0.001), (1, 0.003), (1, 0.001), (9, 1.0)]:
        sink.record(StepStats(num_scheduled_tokens=size, forward_seconds=seconds), None)
    sink.record(StepStats(), None)
    assert lines.lines == []
    clock.advance(1)
    sink.record(None, None)
    assert lines.lines == [
        (
            "INFO",
            "Batchsize forward time stats (batchsize, count, median_time(ms)): "
            "[(1, 3, 1.0), (4, 2, 3.0)]",
        )
    ]
