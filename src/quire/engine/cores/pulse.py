"""What an engine core shows of its progress: a page of memory that it shares with the API process.

Before each step the core writes down what the step holds, which costs a microsecond and wakes
nobody. So the other side knows what a core that says nothing is busy with, even one that will never
say anything again. The page is a file without a name, so nothing is left behind. The stacks that
the core writes at a signal follow in the same file. Knows nothing of steps but three numbers.
"""

from __future__ import annotations

import enum
import faulthandler
import mmap
import os
import signal
import struct
import tempfile
from typing import Final, NamedTuple

PAGE: Final = mmap.PAGESIZE
DUMP_SIGNAL: Final = signal.SIGUSR2
"""Makes a core write the stacks of its threads into the file."""
_FIELDS: Final = struct.Struct("=8Q")


class Activity(enum.IntEnum):
    """What a core does."""

    LOADING = 0
    IDLE = 1
    STEP = 2
    """A step, or what comes before its shape is known."""
    TAKING = 3
    """Queues or ends requests."""
    CALL = 4
    """Runs a control verb, which may take any time."""


class Beat(NamedTuple):
    """What the page says."""

    number: int
    """Counts what was begun: another number means progress."""
    phase: Activity
    tokens: int
    rows: int
    """Requests in the step."""
    attended: int
    """`ScheduledBatch.num_attended_tokens` of the step."""
    taken: int
    """Messages taken so far, when this was begun."""
    said: int
    """Number of the last message said then."""


class Pulse:
    """The page. Made by the API process; the core opens the same file by its descriptor.

    Args:
        descriptor: Of the file that the other side has made; a new file unless given.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _nameless_file() if descriptor is None else descriptor
        self._page = mmap.mmap(self.descriptor, PAGE)
        self._number = 0

    def close(self) -> None:
        """Let go of page and file. Safe to call twice."""
        self._page.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def begin(
        self, phase: Activity, tokens: int, rows: int, attended: int, taken: int, said: int
    ) -> None:
        """Show what begins now; see `Beat`."""
        self._number = number = self._number + 1
        # Written from left to right: a reader who finds two different numbers has come in between.
        _FIELDS.pack_into(self._page, 0, number, phase, tokens, rows, attended, taken, said, number)

    def read(self) -> Beat | None:
        """What the page says now; `None` if it is just being written, which is progress, too."""
        number, phase, *rest, again = _FIELDS.unpack_from(self._page)
        return Beat(number, Activity(phase), *rest) if number == again else None

    # ---- stacks ------------------------------------------------------------------------------

    def dump_at_signal(self) -> None:
        """Have this process write its stacks into the file at `DUMP_SIGNAL`: names of functions,
        files and lines, no values. That works in native code, too, and without Python's lock."""
        os.lseek(self.descriptor, PAGE, os.SEEK_SET)
        faulthandler.register(DUMP_SIGNAL, file=self.descriptor, all_threads=True)

    def stacks(self) -> str:
        """What has been written so far."""
        return os.pread(self.descriptor, 2**20, PAGE).decode("utf-8", "replace")


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("quire-pulse", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, PAGE)
    return descriptor
