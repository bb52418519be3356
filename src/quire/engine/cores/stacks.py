"""What a stuck process was doing, for the log: its threads as the kernel and as Python see them.

Stacks hold names of functions, files and lines and no values, so no text of a request is in them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Final

from quire.engine.cores.pulse import DUMP_SIGNAL, Pulse
from quire.engine.cores.signs import ProcessSigns
from quire.logger import get_logger

logger = get_logger(__name__)

DUMP_SECONDS: Final = 0.5
"""Longest wait for a process to write its stacks."""
QUIET_SECONDS: Final = 0.03
"""They are complete when nothing has been added for so long."""


def log_stacks(pid: int, pulse: Pulse) -> None:
    """Write down what each thread of a process is doing. Blocks for up to `DUMP_SECONDS`.

    A process that is stopped is woken, because it writes its stacks itself: nothing it says may be
    listened to any more.

    Args:
        pid: Of a child that has not been reaped.
        pulse: Which it shares with this process.
    """
    threads = "\n".join(ProcessSigns(pid).describe())
    with contextlib.suppress(OSError):
        os.kill(pid, DUMP_SIGNAL)
        os.kill(pid, signal.SIGCONT)
    stacks = _wait_for(pulse)
    logger.error(
        "the engine core that is stuck, process %d:\n%s\n%s",
        pid,
        threads or "the kernel tells nothing of its threads",
        stacks.strip() or f"It did not write its stacks within {DUMP_SECONDS:.1f} s.",
    )


def _wait_for(pulse: Pulse) -> str:
    end = time.monotonic() + DUMP_SECONDS
    told, grown = "", time.monotonic()
    while (now := time.monotonic()) < end and not (told and now - grown > QUIET_SECONDS):
        time.sleep(0.005)
        if (more := pulse.stacks()) != told:
            told, grown = more, time.monotonic()
    return told
