"""Cores that get stuck in their start: a scheduling policy whose module deadlocks as it is loaded.

`QUIRE_STUCK` is a folder. The process that creates the file `stuck` in it is the one that hangs;
without the file `armed` there, none does.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from quire.core.policies import FCFS

FOLDER = "QUIRE_STUCK"


class Policy(FCFS):
    """First come, first served."""


def deadlock() -> None:
    """Wait for a lock that nobody releases."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def claim(folder: Path) -> bool:
    """Whether this process is the one that hangs."""
    try:
        (folder / "stuck").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if (where := os.environ.get(FOLDER)) and (Path(where) / "armed").exists() and claim(Path(where)):
    deadlock()
