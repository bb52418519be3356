"""Python's garbage collector, kept out of the way. Knows nothing of what it looks through."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """No collections while much is made that stays, such as modules and models.

    Each time their number has grown by a quarter all of them would be looked through.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
