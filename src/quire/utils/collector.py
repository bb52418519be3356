"""Keeps Python's garbage collector out of the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
