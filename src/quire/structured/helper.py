"""The input gate's grammars in a server: compiled first in processes that may be killed.

A schema, a regex or a grammar of a client can take any time and memory to compile. So a
`HelperGate` asks a helper process first (`helper_process`), and only what passed there goes on to
the engine core. Verdicts are remembered. Few grammars are compiled at once, and one that has waited
too long for its turn is refused, so that a flood of them ends in bounded time.

Knows no HTTP and no event loop but that of the caller who waits.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import msgspec

from quire.errors import TooManyRequests
from quire.logger import get_logger
from quire.structured.gate import Answer, Refusal, Verdicts, verdict, verdict_key
from quire.structured.helper_words import HelperLimits, HelperSetup, receive, send
from quire.structured.params import Grammar, StructuredOutputsParams
from quire.utils.host import available_cores
from quire.utils.process import group_signals_held

logger = get_logger(__name__)

MAX_HELPERS: Final = 2
MAX_WAIT: Final = 8.0
"""Seconds for which a grammar may wait for its turn."""
MAX_SILENCE: Final = 30.0
"""Seconds after which a helper that has not answered is killed: its own limits are far below, even
with the start of the process and a large vocabulary."""
REAP_SECONDS: Final = 5.0
"""How often an idle helper looks whether its process is still there."""


@dataclass(slots=True)
class _Job:
    params: StructuredOutputsParams
    key: bytes
    asked: float = field(default_factory=time.monotonic)
    answer: Future[Grammar | Refusal] = field(default_factory=Future)
    waiting: int = 0
    """How many wait for the answer."""


class HelperGate:
    """Settles grammars with the help of processes; a `GrammarGate`.

    Processes and threads start with the first grammar.

    Args:
        tokenizer: Gives the text of `tokenizer.json`.
        vocab_size: Width of the logits.
        eos_token_ids: What may end an output.
        limits: For one grammar.
        max_wait: Seconds for which a grammar may wait for its turn.
    """

    def __init__(
        self,
        tokenizer: Callable[[], str],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: HelperLimits | None = None,
        max_wait: float = MAX_WAIT,
    ) -> None:
        ends = list(eos_token_ids)
        self._begin = lambda: HelperSetup(tokenizer(), vocab_size, ends, limits or HelperLimits())
        self._max_wait = max_wait
        self._verdicts = Verdicts()
        self._jobs: dict[bytes, _Job] = {}
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._helpers: list[_Helper] = []
        self._closed = False

    async def prepare(self, params: StructuredOutputsParams) -> None:
        """Have a grammar looked at, so that `settle` knows the verdict. Whoever waits may be
        cancelled; a grammar for which nobody waits any more is not begun.

        Raises:
            TooManyRequests: others are being compiled, and its turn did not come in time.
        """
        key = verdict_key(params)
        if self._verdicts.find(key) is not None:
            return
        job = self._ask(params, key)
        job.waiting += 1
        try:
            found = await asyncio.shield(asyncio.wrap_future(job.answer))
        finally:
            job.waiting -= 1
            if not job.waiting:
                self._jobs.pop(key, None)
                job.answer.cancel()
        self._verdicts.keep(key, found)

    def settle(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar that a request asks for, which can be compiled. Waits for the verdict, unless
        `prepare` came before.

        Raises:
            InvalidRequest: it cannot.
            TooManyRequests: see `prepare`.
        """
        key = verdict_key(params)
        found = self._verdicts.find(key)
        if found is None:
            job = _Job(params, key, waiting=1)
            self._submit(job)
            found = job.answer.result()
            self._verdicts.keep(key, found)
        return verdict(found)

    def close(self) -> None:
        """End the helpers."""
        self._closed = True
        for helper in self._helpers:
            self._queue.put(None)
            helper.kill()

    def _ask(self, params: StructuredOutputsParams, key: bytes) -> _Job:
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(params, key)
            self._submit(job)
        return job

    def _submit(self, job: _Job) -> None:
        wanted = min(MAX_HELPERS, available_cores())
        if len(self._helpers) < wanted and all(h.is_busy for h in self._helpers):
            helper = _Helper(self._begin, self._queue, self._max_wait)
            self._helpers.append(helper)
            helper.start()
        self._queue.put(job)


class _Helper(threading.Thread):
    """One helper process, and the thread that asks it. The kernel ends the process with its
    thread."""

    def __init__(
        self,
        begin: Callable[[], HelperSetup],
        jobs: queue.SimpleQueue[_Job | None],
        max_wait: float,
    ) -> None:
        super().__init__(name="grammar-helper", daemon=True)
        self._begin = begin
        self._jobs = jobs
        self._max_wait = max_wait
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._ended = False
        self.is_busy = True
        """Not before it waits for its first grammar is it free."""

    def run(self) -> None:
        """Answer grammars until told to end."""
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
                    logger.exception("a grammar could not be looked at")
                job.answer.set_exception(error)
        self.kill()

    def _next(self) -> _Job | None:
        """The next grammar. While there is none, a process that was killed from outside is
        reaped, so that it does not stay a zombie."""
        while True:
            try:
                return self._jobs.get(timeout=REAP_SECONDS)
            except queue.Empty:
                if self._process is not None and self._process.poll() is not None:
                    self._stop()

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._ended = True
        self._stop()

    def _answer(self, job: _Job) -> Grammar | Refusal:
        if time.monotonic() - job.asked > self._max_wait:
            raise TooManyRequests(
                "Other grammars are being compiled, and the turn of this one did not come within "
                f"{self._max_wait:g} seconds. Send it again later.",
                retry_after=self._max_wait,
            )
        for _ in range(2):  # a process that was killed from outside is replaced once
            answer = self._exchange(job.params)
            if answer is not None:
                return answer.found
            self._stop()
            if self._ended:
                break
        return Refusal("structured_outputs: it could not be compiled.", "structured_outputs")

    def _exchange(self, params: StructuredOutputsParams) -> Answer | None:
        """Ask the process; None if it is gone or silent."""
        try:
            if self._process is None:
                self._start()
            assert self._sock is not None
            send(self._sock, params)
            reply = receive(self._sock)
        except OSError:
            return None
        return None if reply is None else msgspec.msgpack.decode(reply, type=Answer)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-m",
                "quire.structured.helper_process",
                str(theirs.fileno()),
            ]
            # One thread each: what forks must have no others.
            environment = {
                **os.environ,
                "OPENBLAS_NUM_THREADS": "1",
                "RAYON_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            }
            with group_signals_held():
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env=environment
                )
        ours.settimeout(MAX_SILENCE)
        self._sock = ours
        send(ours, self._begin())

    def _stop(self) -> None:
        process, sock = self._process, self._sock
        self._process = self._sock = None
        if sock is not None:
            sock.close()
        if process is not None:
            process.kill()
            process.wait()
