"""After a start: goes on with what processes before this one left in the journal.

Each stored HTTP request is given to its route again, as if it came now. The route reads it, renders
and submits as always; only the engine begins with what there was, and the reply is written for
whoever comes for it. So an API needs nothing of its own to be resumed, and the rendering of the
same tokens has the same bytes and ids. Knows no API.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from quire.engine.frontend.disk.disk_journal import DiskJournal
from quire.engine.frontend.disk.stored import StoredFile, StoredStream
from quire.errors import JournalMismatch, QuireError, StartupError
from quire.logger import get_logger
from quire.serving.durable import Recovered, StoredRequest
from quire.serving.errors import NotClaimed
from quire.serving.exchange import KEY, ClientDisconnect, Exchange, Scope
from quire.serving.server_state import ServerState

logger = get_logger(__name__)

LOOK_SECONDS: Final = 0.5
"""Seconds between two looks whether the process before this one has ended."""
PEEK_SECONDS: Final = 0.2
"""Seconds between two looks at what it has written."""
_DECODER: Final = msgspec.msgpack.Decoder(StoredRequest)


class JournalReplay:
    """The journal of one server, from its start to its end.

    Args:
        state: Of the server, whose engine is ready and has the journal.
        journal: On disk.
        router: The routes, behind the gate: who asked was checked when the request came.
    """

    def __init__(self, state: ServerState, journal: DiskJournal, router: Any) -> None:
        self._state = state
        self._journal = journal
        self._router = router
        self._tasks: set[asyncio.Task[None]] = set()
        self._peeking = asyncio.Lock()
        self._peeks = 0
        self._peeked_at = -PEEK_SECONDS
        self._there: dict[str, StoredRequest] | None = None
        # what the process before this one still has, by stream; unknown before the first look
        self._taken: set[str] = set()
        # streams that it has left to this one

    async def begin(self) -> None:
        """Go on with what was left; returns when clients can find it. If a process before this one
        still has the folder, its rest is taken over when it ends.

        Raises:
            StartupError: a file cannot be used.
        """
        await self._adopt()
        if not self._journal.is_owner:
            self._start(self._wait())

    def close(self) -> None:
        """End what runs here."""
        for task in self._tasks:
            task.cancel()

    # ---- while the process before this one lives -------------------------------------------------

    async def look(self) -> None:
        """See what the process before this one has by now, and go on with what it has left to this
        one. Those who ask at the same time share a look."""
        asked = self._peeks
        async with self._peeking:
            if self._peeks > asked or self._journal.is_owner:
                return
            loop = asyncio.get_running_loop()
            await asyncio.sleep(max(0.0, self._peeked_at + PEEK_SECONDS - loop.time()))
            self._peeks += 1
            there: dict[str, StoredRequest] = {}
            for file in await asyncio.to_thread(self._journal.peek):
                for stream in file.streams:
                    if stream.stream_id in self._taken:
                        continue
                    if stream.is_released:
                        self._taken.add(stream.stream_id)
                        await self._resume(file, stream)
                    else:
                        there[stream.stream_id] = _DECODER.decode(stream.opening)
            self._there, self._peeked_at = there, loop.time()

    def has(self, stream_id: str) -> bool:
        """Whether the process before this one may have the stream."""
        return self._there is None or stream_id in self._there

    def has_key(self, owner: bytes, key: str) -> bool:
        """Whether it may have the reply that a client named with this `Idempotency-Key`."""
        return self._there is None or any(
            (request.owner, request.key) == (owner, key) for request in self._there.values()
        )

    async def _wait(self) -> None:
        while not self._journal.is_owner:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._adopt()
            except StartupError as error:
                logger.error("%s", error.message)
                self._state.kept.pending = None
                return

    # ---- when it has ended ---------------------------------------------------------------------

    async def _adopt(self) -> None:
        async with self._peeking:
            await self._adopt_all()

    async def _adopt_all(self) -> None:
        files = await asyncio.to_thread(self._journal.adopt)
        if not self._journal.is_owner:
            return
        self._there = None  # what it had is on its way
        # A process that ended while it went on with others' streams left them twice.
        latest: dict[str, tuple[StoredFile, StoredStream]] = {}
        for file in files:
            for stream in file.streams:
                if stream.stream_id in self._taken:
                    continue
                before = latest.get(stream.stream_id)
                if before is None or stream.num_tokens() >= before[1].num_tokens():
                    latest[stream.stream_id] = file, stream
        resumed = 0
        for file, stream in latest.values():
            resumed += await self._resume(file, stream)
        await self._journal.written()
        for file in files:
            self._journal.discard(file)
        self._state.kept.pending = None
        if latest:
            logger.info("went on with %d of %d request(s) of the journal", resumed, len(latest))

    async def _resume(self, file: StoredFile, stream: StoredStream) -> bool:
        """Render one stream again; whether that could begin."""
        recovered = Recovered(stream, _DECODER.decode(stream.opening))
        if wrong := self._mismatch(file):
            recovered.refusal = JournalMismatch(wrong)
        task = self._start(self._render(recovered))
        await asyncio.wait((task, asyncio.ensure_future(recovered.begun.wait())),
                           return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        await asyncio.sleep(0)
        return recovered.refusal is None

    def _mismatch(self, file: StoredFile) -> str | None:
        """What would make other tokens here than where the file was written."""
        here = self._journal.identity
        wrong = [name for name, value in here.items() if file.identity.get(name) != value]
        if not wrong:
            return None
        logger.error(
            "the journal %s was written with another %s: its %d request(s) end",
            file.path.name,
            ", ".join(wrong),
            len(file.streams),
        )
        return ", ".join(wrong)

    async def _render(self, recovered: Recovered) -> None:
        request = recovered.request
        body = {"type": "http.request", "body": request.body, "more_body": False}
        inbox = [body]

        async def receive() -> dict[str, Any]:
            if inbox:
                return inbox.pop()
            await asyncio.Event().wait()  # nobody disconnects
            raise AssertionError("this is never reached")

        async def send(message: dict[str, Any]) -> None:
            """Nobody listens: readers have the kept reply."""

        scope: Scope = {
            "type": "http", "method": "POST", "path": request.path, "root_path": "",
            "raw_path": request.path.encode(), "query_string": b"", "http_version": "1.1",
            "headers": request.headers, "client": None, "server": None, "scheme": "http",
        }  # fmt: skip
        exchange = Exchange(scope, receive, send, self._state)
        exchange.recover(recovered)
        scope[KEY] = exchange
        try:
            await self._router(scope, receive, send)
        except ClientDisconnect:
            pass
        except QuireError as error:
            logger.error("a request of the journal could not go on: %s", error.message)
        except Exception:
            logger.exception("a request of the journal could not go on")
        finally:
            recovered.begun.set()
            exchange.leave()
        timeout = self._state.config.journal_claim_timeout
        if exchange.kept is not None and not exchange.kept.ended:
            self._start(self._claim(exchange, timeout))

    async def _claim(self, exchange: Exchange, seconds: float) -> None:
        """End a reply that nobody comes for."""
        assert exchange.kept is not None
        await asyncio.sleep(seconds)
        if not exchange.kept.was_read:
            exchange.kept.stop(NotClaimed(seconds))

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
