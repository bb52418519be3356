"""Reads single keys of a terminal while something else is shown. Knows no key's meaning."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from types import TracebackType
from typing import Self


class Keys:
    """A context in which keys arrive without Enter and are not shown.

    If the input is not a terminal, no keys arrive, and `wait` only waits. Ctrl-C interrupts as
    usual. The terminal is restored at the end, whatever happens.
    """

    def __init__(self) -> None:
        self._restore = contextlib.ExitStack()
        self._is_terminal = False

    def __enter__(self) -> Self:
        with contextlib.suppress(ImportError, OSError, ValueError):
            import termios
            import tty

            descriptor = sys.stdin.fileno()
            if sys.stdin.isatty():
                before = termios.tcgetattr(descriptor)
                self._restore.callback(termios.tcsetattr, descriptor, termios.TCSADRAIN, before)
                tty.setcbreak(descriptor)
                self._is_terminal = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore.close()

    def wait(self, seconds: float) -> str | None:
        """The next key, or None if none is pressed in time."""
        if not self._is_terminal:
            time.sleep(seconds)
            return None
        descriptor = sys.stdin.fileno()
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return None
        # Not through the buffer: select knows nothing of what is in there.
        key = os.read(descriptor, 1)
        if not key:  # the terminal is gone: no more keys, and no busy loop either
            self._is_terminal = False
            time.sleep(seconds)
        return key.decode("latin-1") or None
