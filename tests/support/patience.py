"""How tests wait: for what happens, with a patience that no busy machine outlasts.

A limit here ends a test that would hang; it says nothing about how fast something is. What time
things take is for `benchmarks/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 300.0
"""Seconds after which a test that waits has failed."""


def wait_for(condition: Callable[[], Any], what: object = "it", seconds: float = PATIENCE) -> Any:
    """What `condition` gives, once that is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        told = what() if callable(what) else what
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {told}"
        time.sleep(0.02)
    return found
