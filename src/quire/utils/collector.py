"""Keeps Python's garbage collector out of the way."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

PERIOD_SECONDS: Final = 0.1
"""Between two looks at what was made since the last."""
MIDDLE_PERIODS: Final = 3
"""After which what these looks left is looked at once more."""
CALM_PERIODS: Final = 100
"""After which everything is looked at, when there is no work."""
BUSY_PERIODS: Final = 3000
"""The same when there is."""


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause collection while many objects are made that will stay, such as modules and models.

    Otherwise the collector would traverse all of them each time their number has grown by a
    quarter.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep_present() -> None:
    """Exempt what is there now from all further collections.

    Call it once, when everything that stays has been made: to look through all of it takes up to a
    tenth of a second each time, in which every request would wait.
    """
    gc.collect()  # garbage is not exempted
    gc.freeze()


class PacedCollection:
    """Collects garbage by the clock instead of by counts of objects.

    Python looks for garbage when 700 more objects have been made than freed. Where about as many
    requests end as begin, that is seldom, and everything made meanwhile is then looked through at
    once: 20 to 55 ms with a thousand requests waiting, in which nobody gets an answer. What a tenth
    of a second leaves is little. What is older is looked through while nothing is to be done:
    requests leave no circles of objects, so hardly anything waits for it.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._periods = 0
        """Since everything was looked at."""

    async def run(self) -> None:
        """Collect until cancelled; Python's own way holds before and afterwards."""
        gc.disable()
        try:
            while True:
                await asyncio.sleep(PERIOD_SECONDS)
                gc.collect(self._oldest_due())
        finally:
            gc.enable()

    def _oldest_due(self) -> int:
        """The oldest generation to look at now; 2 is everything."""
        self._periods += 1
        if self._periods >= (BUSY_PERIODS if self._busy() else CALM_PERIODS):
            self._periods = 0
            return 2
        return 0 if self._periods % MIDDLE_PERIODS else 1
