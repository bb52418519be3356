"""Log lines leave through a thread: whoever does not read them stops nobody.

A pipe whose reader stands still (a paused terminal, a log driver whose disk is full) blocks those
who write to it. In a server that would be the event loop, and with it every stream. Here lines
wait, up to a number; what comes beyond is dropped, and the first line that leaves afterwards says
how many were. The lines of a process that is killed may be missing for its last milliseconds.

Writes to a descriptor, without a buffer of Python's: at exit the interpreter takes the lock of such
a buffer, which a thread that waits for the reader would hold. Knows no format.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from contextlib import suppress
from typing import Final

MOST_LINES: Final = 10_000
"""That wait for the reader."""
EXIT_SECONDS: Final = 1.0
"""That the end of the process waits for lines to leave."""


class LogThread(logging.Handler):
    """A handler whose lines a thread writes.

    Args:
        descriptor: Where they go.
        formatter: What makes lines of records.
        most: Lines that may wait.
    """

    def __init__(
        self, descriptor: int, formatter: logging.Formatter, most: int = MOST_LINES
    ) -> None:
        super().__init__()
        # Not `queue.Queue`: a signal handler that logs may interrupt a `put`.
        self._lines: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self.setFormatter(formatter)
        self._descriptor = descriptor
        self._most = most
        self.num_dropped = 0
        """Since the last line that said how many."""
        threading.Thread(target=self._write_all, daemon=True, name="log").start()
        atexit.register(self.leave)

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line, or count it if too many wait."""
        if self._lines.qsize() >= self._most:
            self.num_dropped += 1
            return
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self._lines.put(line.encode("utf-8", "backslashreplace") + b"\n")

    def leave(self, seconds: float = EXIT_SECONDS) -> bool:
        """Wait until what was logged has been written; whether it was."""
        written = threading.Event()
        self._lines.put(written)
        return written.wait(seconds)

    def _write_all(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            with suppress(OSError):  # the reader is gone: nobody is left to tell
                self._write(line)
                if dropped := self.num_dropped:
                    self.num_dropped -= dropped
                    self._write(self._told(dropped))

    def _write(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._descriptor, line) :]

    def _told(self, dropped: int) -> bytes:
        text = f"{dropped} log lines were dropped: what reads them was too slow"
        record = logging.LogRecord(
            __name__, logging.WARNING, __file__, 0, text, args=None, exc_info=None
        )
        return self.format(record).encode() + b"\n"
