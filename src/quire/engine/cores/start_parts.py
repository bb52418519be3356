"""Where the time goes between the start of a core and its readiness, part by part.

Parts are those of `quire.core.stats.RECOVERY_PARTS`. Knows the names of the phases that loading
reports; knows no processes.
"""

from __future__ import annotations

from typing import Final

from quire.utils.timing import Clock, RealClock

_PHASES: Final = {
    "Verifying files": "verify",
    "Loading weights": "weights",
    "Allocating KV cache": "kv_cache",
}


class StartParts:
    """A clock with laps, read in the core's process.

    Args:
        begun: When the core was asked for, in seconds of the machine's monotonic clock.
        clock: That clock.
    """

    def __init__(self, begun: float, clock: Clock | None = None) -> None:
        self.seconds: dict[str, float] = {}
        """By part, as far as they have ended."""
        self._clock = clock or RealClock()
        self._last = begun
        self._part = "config"
        # what runs while the core loads, until it says otherwise

    def end(self, part: str, at: float | None = None) -> None:
        """A part has ended just now, or at that time."""
        now = self._clock.now() if at is None else at
        self.seconds[part] = self.seconds.get(part, 0.0) + max(0.0, now - self._last)
        self._last = max(now, self._last)

    def hear(self, phase: str) -> None:
        """Loading reports progress of a phase: whatever ran before it has ended."""
        part = _PHASES.get(phase, self._part)
        if part != self._part:
            self.end(self._part)
            self._part = part

    def end_loading(self) -> None:
        """The core is ready."""
        self.end(self._part)
