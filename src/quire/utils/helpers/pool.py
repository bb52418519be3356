"""Helper processes, and the threads that ask them.

A few pieces of work are done at once, the others wait for their turn. One that waited too long is
refused, so that a flood ends in bounded time. A process that dies or does not answer is replaced.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from quire.errors import TooManyRequests
from quire.logger import get_logger
from quire.utils.helpers.words import receive, send
from quire.utils.host import available_cores
from quire.utils.process import group_signals_held

logger = get_logger(__name__)

MAX_HELPERS: Final = 2
MAX_WAIT: Final = 8.0
"""Seconds for which work may wait for its turn."""
MAX_SILENCE: Final = 30.0
"""Seconds after which a helper that has not answered is killed: its own limits are far below, even
with the start of the process and a large vocabulary."""
REAP_SECONDS: Final = 5.0
"""How often an idle helper looks whether its process is still there."""


@dataclass(slots=True)
class _Job:
    word: Callable[[], object]
    asked: float = field(default_factory=time.monotonic)
    answer: Future[bytes | None] = field(default_factory=Future)


class HelperPool:
    """Processes of one kind. They and their threads start with the first work.

    Args:
        module: What each runs, with the number of its socket as argument.
        setup: The first word for each.
        name: Of their threads.
        busy: What others are doing, for whoever is refused: `Other grammars are being compiled`.
        max_wait: Seconds for which work may wait for its turn.
    """

    def __init__(
        self,
        module: str,
        setup: Callable[[], object],
        name: str,
        busy: str,
        max_wait: float = MAX_WAIT,
    ) -> None:
        self._module = module
        self._setup = setup
        self._name = name
        self._busy = busy
        self._max_wait = max_wait
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._helpers: list[_Helper] = []

    def ask(self, word: Callable[[], object]) -> Future[bytes | None]:
        """The answer to a word, which is made on the helper's thread: None if two processes in a
        row could not answer. Raises `TooManyRequests` if its turn did not come in time."""
        wanted = min(MAX_HELPERS, available_cores())
        if len(self._helpers) < wanted and all(h.is_busy for h in self._helpers):
            helper = _Helper(self)
            self._helpers.append(helper)
            helper.start()
        job = _Job(word)
        self._queue.put(job)
        return job.answer

    def close(self) -> None:
        """End the helpers."""
        for helper in self._helpers:
            self._queue.put(None)
            helper.kill()

    def next(self) -> _Job | None:
        """The next piece of work, or None at the end.

        Raises:
            queue.Empty: there is none for some time.
        """
        return self._queue.get(timeout=REAP_SECONDS)

    def refusal(self, job: _Job) -> TooManyRequests | None:
        """What to say to work that waited too long."""
        if time.monotonic() - job.asked <= self._max_wait:
            return None
        return TooManyRequests(
            f"{self._busy}, and the turn of this one did not come within "
            f"{self._max_wait:g} seconds. Send it again later.",
            retry_after=self._max_wait,
        )

    def passing(self, said: str) -> TooManyRequests:
        """What to say to work that failed because of the machine, not of itself."""
        again = "The machine is busy or short of memory. Send it again later."
        return TooManyRequests(f"{said} {again}", retry_after=self._max_wait)

    def start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """A new process that has its first word."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", self._module, str(theirs.fileno())]
            # One thread each: what forks must have no others.
            environment = {
                **os.environ,
                "OPENBLAS_NUM_THREADS": "1",
                "RAYON_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            }
            with group_signals_held():
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        ours.settimeout(MAX_SILENCE)
        try:
            send(ours, self._setup())
        except BaseException:
            ours.close()
            process.kill()
            process.wait()
            raise
        return process, ours

    @property
    def name(self) -> str:
        """Of the threads."""
        return self._name


class _Helper(threading.Thread):
    """One process, and the thread that asks it. The kernel ends the process with its thread."""

    def __init__(self, pool: HelperPool) -> None:
        super().__init__(name=pool.name, daemon=True)
        self._pool = pool
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._ended = False
        self.is_busy = True
        """Not before it waits for its first work is it free."""

    def run(self) -> None:
        """Answer until told to end."""
        while True:
            self.is_busy = False
            job = self._next()
            self.is_busy = True
            if job is None:
                break
            if not job.answer.set_running_or_notify_cancel():
                continue
            try:
                job.answer.set_result(self._answer(job))
            except Exception as error:
                if not isinstance(error, TooManyRequests):
                    logger.exception("a helper could not be asked")
                job.answer.set_exception(error)
        self.kill()

    def _next(self) -> _Job | None:
        """The next work. While there is none, a process that was killed from outside is reaped, so
        that it does not stay a zombie."""
        while True:
            try:
                return self._pool.next()
            except queue.Empty:
                if self._process is not None and self._process.poll() is not None:
                    self._stop()

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._ended = True
        self._stop()

    def _answer(self, job: _Job) -> bytes | None:
        if (refusal := self._pool.refusal(job)) is not None:
            raise refusal
        word = job.word()
        for _ in range(2):  # a process that was killed from outside is replaced once
            answer = self._exchange(word)
            if answer is not None:
                return answer
            self._stop()
            if self._ended:
                break
        return None

    def _exchange(self, word: object) -> bytes | None:
        """Ask the process; None if it is gone or silent."""
        try:
            if self._process is None:
                self._process, self._sock = self._pool.start()
            assert self._sock is not None
            send(self._sock, word)
            return receive(self._sock)
        except OSError:
            return None

    def _stop(self) -> None:
        process, sock = self._process, self._sock
        self._process = self._sock = None
        if sock is not None:
            sock.close()
        if process is not None:
            process.kill()
            process.wait()
