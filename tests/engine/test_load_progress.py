"""Progress of a start: silent when short, a line on a terminal, now and then a line in a log."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from quire.engine.frontend.load_progress import LoadProgress
from quire.utils.timing import ManualClock

GIB = 2**30


@pytest.fixture
def lines() -> Iterator[list[str]]:
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("quire.engine.frontend.load_progress"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def load(progress: LoadProgress, clock: ManualClock, seconds: float, until: int = 100) -> None:
    """A gibibyte each hundredth of the time."""
    for done in range(until + 1):
        progress.update("Loading weights", done * GIB, 100 * GIB)
        clock.advance(seconds / 100)


@pytest.mark.parametrize("terminal", [None, io.StringIO()])
def test_a_short_start_shows_nothing(lines: list[str], terminal: io.StringIO | None) -> None:
    clock = ManualClock()
    progress = LoadProgress(clock, terminal)
    load(progress, clock, 1.9)
    progress.finish()
    assert lines == [] and (terminal is None or terminal.getvalue() == "")


def test_a_log_gets_a_line_now_and_then(lines: list[str]) -> None:
    clock = ManualClock()
    progress = LoadProgress(clock)
    load(progress, clock, 50)
    progress.update("Allocating KV cache", 0, 7)
    assert lines[0] == ("Loading weights: 4.0 GiB of 100.0 GiB (4 %), 2.0 GiB/s, 48 s left")
    assert len(lines) == 6
    assert lines[-1] == "Loading weights: 100.0 GiB in 50.5 s, 2.0 GiB/s"
    progress.finish()
    assert len(lines) == 6


def test_a_terminal_has_one_line_that_goes(lines: list[str]) -> None:
    clock, terminal = ManualClock(), io.StringIO()
    progress = LoadProgress(clock, terminal)
    load(progress, clock, 10)
    text = terminal.getvalue()
    assert "\n" not in text and text.count("\r") == 80
    assert text.startswith("Loading weights: 20.0 GiB of 100.0 GiB (20 %)")
    progress.finish()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert lines == ["Loading weights: 100.0 GiB in 10.1 s, 9.9 GiB/s"]


def test_a_start_that_failed_is_not_summed_up(lines: list[str]) -> None:
    clock = ManualClock()
    progress = LoadProgress(clock)
    load(progress, clock, 10, until=50)
    progress.finish()
    assert lines and not any(" in " in line for line in lines)
