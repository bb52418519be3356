"""An open-loop load: requests go out when they are due, whatever became of earlier ones.

With `max_concurrency`, a due request waits for a place, and its time begins when it gets one. A
server that died or hangs ends the run: what was not answered then counts as failed. Knows no HTTP:
`ask` is any coroutine that makes a record.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire.bench.result import RequestRecord
from quire.workload.request import WorkloadRequest

Ask = Callable[[int, WorkloadRequest], Awaitable[RequestRecord]]
CHECK_SECONDS: Final = 0.1
NOT_SENT: Final = "not sent: "
UNREACHABLE: Final = "cannot connect: "
"""How the error of a request begins that found no server."""


@dataclass(slots=True)
class Patience:
    """How long a server may give no sign of life.

    Args:
        stall: Seconds without a byte on any connection, while requests are unanswered.
        unreachable: Seconds in which every attempt to connect fails.
    """

    stall: float = 120.0
    unreachable: float = 10.0


@dataclass
class LoadOutcome:
    """What came of a load."""

    records: list[RequestRecord]
    """One per request, in the order of the requests."""
    duration: float
    """Seconds from the beginning to the last end."""
    verdict: str = ""
    """Why the run was ended early; empty: it was not."""


class ServerWatch:
    """Sees whether the server is alive, from what its connections do.

    Args:
        patience: When it gives up.
        clock: Seconds.
    """

    def __init__(self, patience: Patience, clock: Callable[[], float] = time.perf_counter) -> None:
        self._patience, self._clock = patience, clock
        self._heard_at = clock()
        self._unreachable_since: float | None = None
        self._num_in_flight = 0

    def heard(self) -> None:
        """A byte came."""
        self._heard_at = self._clock()
        self._unreachable_since = None

    def sent(self) -> None:
        """A request goes out. Silence before the first does not count."""
        if self._num_in_flight == 0:
            self._heard_at = self._clock()
        self._num_in_flight += 1

    def ended(self, record: RequestRecord) -> None:
        """A request has its record."""
        self._num_in_flight -= 1
        if record.error.startswith(UNREACHABLE) and self._unreachable_since is None:
            self._unreachable_since = self._clock()

    def verdict(self) -> str:
        """Why to give up; empty: no reason."""
        now, since, patience = self._clock(), self._unreachable_since, self._patience
        if since is not None and now - since > patience.unreachable:
            return (
                f"the server cannot be reached for {now - since:.0f} s (--unreachable-timeout "
                f"{patience.unreachable:g})"
            )
        silence = now - self._heard_at
        if self._num_in_flight and silence > patience.stall:
            return (
                f"the server sent nothing for {silence:.0f} s, with {self._num_in_flight} requests "
                f"unanswered (--stall-timeout {patience.stall:g})"
            )
        return ""


class OpenLoopLoad:
    """One run.

    Args:
        requests: What to ask.
        times: When each is due, in seconds from the beginning, ascending.
        ask: Sends one and gives its record.
        watch: Hears of every byte that comes.
        max_concurrency: Requests that may be unanswered at a time.
        done: Told of each record.
    """

    def __init__(
        self,
        requests: Sequence[WorkloadRequest],
        times: NDArray[np.float64],
        ask: Ask,
        watch: ServerWatch,
        *,
        max_concurrency: int | None = None,
        done: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self._requests, self._times, self._ask = requests, times, ask
        self._watch, self._done = watch, done
        self._places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._records: list[RequestRecord | None] = [None] * len(requests)
        self._started: dict[int, float] = {}

    async def run(self) -> LoadOutcome:
        """Send everything and wait for the ends."""
        start = time.perf_counter()
        work = asyncio.create_task(self._send(start))
        verdict = ""
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=CHECK_SECONDS)
                if not work.done() and (verdict := self._watch.verdict()):
                    break
        finally:
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
        if not verdict:
            work.result()
        now = time.perf_counter()
        records = [record or self._unanswered(i, now, verdict) for i, record in self._numbered()]
        return LoadOutcome(records, now - start, verdict)

    def _numbered(self) -> list[tuple[int, RequestRecord | None]]:
        return list(enumerate(self._records))

    async def _send(self, start: float) -> None:
        async with asyncio.TaskGroup() as group:
            for index, due in enumerate(self._times):
                wait = start + float(due) - time.perf_counter()
                # At an infinite rate the loop must turn as well, or nothing would be sent before
                # everything has been queued.
                await asyncio.sleep(max(0.0, wait))
                group.create_task(self._one(index, max(start + float(due), start)))

    async def _one(self, index: int, due: float) -> None:
        if self._places is None:
            await self._ask_now(index, due)
            return
        async with self._places:
            await self._ask_now(index, due)

    async def _ask_now(self, index: int, due: float) -> None:
        request = self._requests[index]
        self._started[index] = time.perf_counter()
        self._watch.sent()
        record = await self._ask(index, request)
        self._watch.ended(record)
        record.queue_time = max(0.0, record.start - due)
        self._records[index] = record
        self._done(record)

    def _unanswered(self, index: int, now: float, verdict: str) -> RequestRecord:
        sent = self._started.get(index)
        error = verdict if sent is not None else NOT_SENT + verdict
        return RequestRecord(now if sent is None else sent, 0, error=error)
