"""Whether the machine, or the container, is about to run out of memory, so that caches should go
before the kernel ends a process. Knows nothing of what could be given back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from quire.utils.host import AvailableMemory

LOW: Final = 64 * 2**20
"""Bytes left below which it is short."""
PAUSE: Final = 1.0
"""Seconds between two looks, of which each reads a few files."""
LONGEST_PAUSE: Final = 300.0
"""Seconds between two looks at most."""


class MemoryPressure:
    """Looks now and then. Where memory stays short, it says so ever less often: a cache that is
    dropped each second for somebody else's need would be none.

    Args:
        available: Bytes that can still be allocated, told each time it is called.
    """

    def __init__(self, available: Callable[[], int] | None = None) -> None:
        self._available = available or AvailableMemory()
        self._after = float("-inf")
        self._pause = PAUSE

    def is_due(self, now: float) -> bool:
        """Whether it is time to look again, `now` being monotonic seconds."""
        return now >= self._after

    def look(self, now: float) -> int | None:
        """Bytes left, if they are too few; else `None`."""
        left = self._available()
        if left >= LOW:
            self._pause = PAUSE
        self._after = now + self._pause
        if left >= LOW:
            return None
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return left
