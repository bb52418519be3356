"""The engine's clock: monotonic seconds, replaceable in tests.

Wall-clock time is only for printing; the engine makes no decision by it.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Anything that gives monotonic seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary fixed point; never goes back."""
        ...


class RealClock:
    """The system's monotonic clock; the same in all processes of one machine."""

    def now(self) -> float:
        """Seconds since boot."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """The time last set."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back {seconds} s")
        self._now += seconds
