"""How fast a queue drains, measured, and how long what waits will take at that rate.

Time counts only while something waits: an idle hour says nothing about speed. Older measurements
fade, so the rate is that of the last seconds with a queue. While nothing leaves, the rate falls by
itself, so a stalled engine is not promised to be fast. Knows no request.
"""

from __future__ import annotations

from typing import Final

HALF_LIFE: Final = 5.0
"""Seconds with a queue after which a measurement counts half."""
ENOUGH: Final = 0.25
"""Seconds with a queue before the rate is told; the first step alone says too little."""


class DrainRate:
    """Tokens and requests that leave the queue per second, as faded sums over faded time."""

    def __init__(self) -> None:
        self._tokens = self._requests = self._seconds = 0.0
        self._since: float | None = None
        # up to when time was counted; None while nothing waits

    def busy(self, now: float) -> None:
        """Something waits from now on, if nothing did before."""
        if self._since is None:
            self._since = now

    def drained(self, now: float, tokens: int, requests: int) -> None:
        """So much has left the queue because its turn came."""
        self._count_time(now)
        self._tokens += tokens
        self._requests += requests

    def idle(self, now: float) -> None:
        """Nothing waits any more."""
        self._count_time(now)
        self._since = None

    def _count_time(self, now: float) -> None:
        if self._since is None:
            return
        seconds = max(0.0, now - self._since)
        fade = 0.5 ** (seconds / HALF_LIFE)
        self._tokens *= fade
        self._requests *= fade
        # What leaves at the end of this time is attributed to all of it, so a constant rate is
        # measured exactly, however unevenly it is reported.
        self._seconds = self._seconds * fade + seconds
        self._since = now

    def seconds_for(self, now: float, tokens: int, requests: int) -> float | None:
        """Seconds until so much has left: the longer of both. `None` as long as too little was
        measured."""
        self._count_time(now)
        if self._seconds < ENOUGH or not self._requests:
            return None
        by_tokens = tokens * self._seconds / self._tokens if self._tokens else 0.0
        return max(by_tokens, requests * self._seconds / self._requests)
