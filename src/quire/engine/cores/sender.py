"""Sends frames through a socket, in their order, and never keeps its caller waiting.

A frame goes at once as far as the socket takes it. A thread would have to get a processor first:
where kernels use all of them, a token came up to 4 ms later, and waited for the interpreter lock
besides. What the socket does not take, since its reader is slow, is left to a thread, and so is all
that comes after it until the thread is done. Knows no messages.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


class Sender:
    """Of one socket, which nobody else writes to.

    Args:
        sock: A blocking one.
        guard: Around all that is sent; what comes out of sending goes there.
    """

    def __init__(
        self, sock: socket.socket, guard: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._sock = sock
        self._guard = guard
        self._left: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._num_left = self._num_sent = 0
        # what was left to the thread, and what of it that has sent; each has one writer
        self._thread: threading.Thread | None = None

    def put(self, frame: bytes) -> None:
        """Send a frame. To be called on one thread."""
        with self._guard():
            rest = memoryview(frame)
            if self._num_sent == self._num_left:
                rest = rest[self._send_some(rest) :]
            if rest:
                self._leave(rest)

    def close(self, seconds: float) -> None:
        """Wait until everything is sent, or for so long. Nothing can be put afterwards."""
        if self._thread is not None:
            self._left.put(None)
            self._thread.join(seconds)

    def _send_some(self, rest: memoryview) -> int:
        try:
            return self._sock.send(rest, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _leave(self, rest: memoryview) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="core-writer", daemon=True)
            self._thread.start()
        self._num_left += 1
        self._left.put(rest)

    def _run(self) -> None:
        with self._guard():
            while (rest := self._left.get()) is not None:
                self._sock.sendall(rest)
                self._num_sent += 1
