"""Finds out whether something leaves circles of objects, which only the garbage collector frees."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def circles(times: int = 1) -> Iterator[Counter[str]]:
    """Counts, by type, the objects that only the collector found, for each of so many times.

    What is found less often is somebody else's: a thread of another test that ends meanwhile.
    """
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    flags = gc.get_debug()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        counts = Counter(type(object_).__qualname__ for object_ in gc.garbage)
        found.update({name: each for name, n in counts.items() if (each := n // times)})
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
        gc.enable()
