"""How far the loading of a model is: a line on a terminal, or now and then a line in a log.

A start that takes no longer than `QUIET_SECONDS` shows nothing. `Loading` also notes when each
phase began, for the trace of the start. Hears (phase, bytes done, bytes in all); knows no files
and no processes.
"""

from __future__ import annotations

import shutil
import sys
from typing import Final, TextIO

from quire.logger import get_logger
from quire.observability.traces.tracer import PhaseLog
from quire.utils.math import human_bytes
from quire.utils.timing import Clock, RealClock

logger = get_logger(__name__)

QUIET_SECONDS: Final = 2.0
"""Nothing is shown of a phase before."""
REDRAW_SECONDS: Final = 0.1
LOG_SECONDS: Final = 10.0
"""Between two lines of a log."""
_CLEAR: Final = "\x1b[K"


class LoadProgress:
    """Shows the phases of a start.

    Args:
        clock: Monotonic time.
        terminal: Where to draw; standard error, if that is a terminal, unless given. `None` after
            that means: a log.
    """

    def __init__(self, clock: Clock | None = None, terminal: TextIO | None = None) -> None:
        self._clock = clock or RealClock()
        self._terminal = terminal or (sys.stderr if sys.stderr.isatty() else None)
        self._interval = REDRAW_SECONDS if self._terminal else LOG_SECONDS
        self._phase = ""
        self._begun = self._due = self._clock.now()
        self._first = self._done = self._total = 0
        self._shown = False

    def update(self, phase: str, done: int, total: int) -> None:
        """Hear of bytes `done` of `total` in a phase."""
        now = self._clock.now()
        if phase != self._phase:
            self.finish()
            self._phase, self._begun, self._due = phase, now, now + QUIET_SECONDS
            self._first = done
        self._done, self._total = done, total
        if now >= self._due and done < total:
            self._due = now + self._interval
            self._show(f"{phase}: {self._text(now)}")

    def finish(self) -> None:
        """The phase is over: remove the line, and sum up a phase that was long."""
        now = self._clock.now()
        if self._shown and self._terminal is not None:
            print(f"\r{_CLEAR}", end="", file=self._terminal, flush=True)
        if self._shown and self._done == self._total:
            size, rate = human_bytes(self._total), human_bytes(self._rate(now))
            logger.info("%s: %s in %.1f s, %s/s", self._phase, size, now - self._begun, rate)
        self._shown, self._phase = False, ""

    def _rate(self, now: float) -> float:
        """Bytes per second; the first piece had been read when the phase was first heard of."""
        return (self._done - self._first) / max(now - self._begun, 1e-9)

    def _text(self, now: float) -> str:
        rate = self._rate(now)
        left = f", {(self._total - self._done) / rate:.0f} s left" if rate > 0 else ""
        return (
            f"{human_bytes(self._done)} of {human_bytes(self._total)} "
            f"({100 * self._done / self._total:.0f} %), {human_bytes(rate)}/s{left}"
        )

    def _show(self, text: str) -> None:
        self._shown = True
        if self._terminal is None:
            logger.info("%s", text)
        else:
            # The cursor goes back, so that a line of the log takes the place of this one.
            room = shutil.get_terminal_size().columns - 1
            print(f"{text[:room]}{_CLEAR}", end="\r", file=self._terminal, flush=True)


class Loading:
    """The start of an engine, as it is shown and as it is remembered.

    Args:
        clock: The engine's.
        first: What the start begins with.
    """

    def __init__(self, clock: Clock, first: str) -> None:
        self.phases = PhaseLog(clock.now(), first)
        self._clock = clock
        self._shown = LoadProgress(clock)

    def enter(self, phase: str) -> None:
        """A phase begins of which no progress is known."""
        self.phases.enter(phase, self._clock.now())

    def update(self, phase: str, done: int, total: int) -> None:
        """Hear of bytes `done` of `total` in a phase."""
        self.enter(phase)
        self._shown.update(phase, done, total)

    def finish(self) -> None:
        """It is over, one way or the other. Safe to call twice."""
        self._shown.finish()
