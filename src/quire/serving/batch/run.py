"""Runs the lines of a batch through the server's application, in the same process, without sockets.

So a body is read, checked, limited and answered by the code that serves it over HTTP, and the
reply has the same bytes. A bounded number of lines is in work at once; of the others, memory holds
two numbers. What the server refuses because it is busy is asked again; nothing else is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from quire.errors import EngineDead
from quire.serving.app import ROUTES
from quire.serving.auth import Role
from quire.serving.batch.lines import BadLine, BatchLine, bad_line, read_line, reply_line
from quire.serving.batch.unfinished import Unfinished, digest_of
from quire.serving.server_state import ServerState

BUSY: Final = (429, 503)
"""Statuses that ask to come again."""
LONGEST_PAUSE: Final = 10.0
MOST_TRIES: Final = 1000
READ_AHEAD: Final = 64
"""Lines that are read in one go, on a thread: the input may be at the end of a slow line."""


def batch_urls() -> dict[str, str]:
    """Routes that a batch may ask for: those that answer a body with one of their own."""
    rows = {path: ROUTES.get(path) for path in ROUTES}
    return {
        path: path
        for path, row in rows.items()
        if row.role is Role.USER and row.body is not None and "{" not in path
    }


@dataclass(slots=True)
class LocalReply:
    """What the application answered."""

    status: int = 0
    headers: dict[bytes, bytes] | None = None
    body: bytes = b""


async def call(app: Any, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> LocalReply:
    """Give the application a POST, as an HTTP server would."""
    reply = LocalReply()
    told = False

    async def receive() -> dict[str, Any]:
        nonlocal told
        if told:
            await asyncio.get_running_loop().create_future()  # the client stays
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            reply.status, reply.headers = message["status"], dict(message["headers"])
        else:
            reply.body += message.get("body", b"")

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": headers, "client": None, "server": None,
    }  # fmt: skip
    await app(scope, receive, send)
    return reply


class BatchRun:
    """One run over a batch.

    Args:
        app: The server's application.
        state: Its state, with a model that is ready.
        unfinished: Takes the results, and knows those of a run before.
        concurrency: Lines in work at once.
        seen: Called for each line that is done, with whether it failed.
    """

    def __init__(
        self,
        app: Any,
        state: ServerState,
        unfinished: Unfinished,
        concurrency: int,
        seen: Callable[[bool], None],
    ) -> None:
        self._app = app
        self._state = state
        self._unfinished = unfinished
        self._free = asyncio.Semaphore(concurrency)
        self._seen = seen
        self._urls = batch_urls()
        self._told = ", ".join(path for path in self._urls if "render" not in path)
        self._names: dict[bytes, int] = {}
        # digest of each custom_id, and the line it was first used in
        self._headers = [(b"content-type", b"application/json")]
        if keys := state.config.api_key:
            self._headers.append((b"authorization", f"Bearer {keys[0]}".encode()))

    async def run(self, lines: Iterator[tuple[int, bytes | None]]) -> int:
        """Run all lines that are not done yet; returns how many there are in all.

        Raises:
            ConfigError: the input cannot be read, or is not that of the run before.
            EngineDead: the engine died; what was done until then is kept.
            OSError: a result could not be written.
        """
        last = 0
        try:
            async with asyncio.TaskGroup() as group:
                while some := await asyncio.to_thread(list, islice(lines, READ_AHEAD)):
                    for last, data in some:
                        await self._begin(group, last, data)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return last

    async def _begin(self, group: asyncio.TaskGroup, number: int, data: bytes | None) -> None:
        digest = digest_of(data or b"")
        is_done = self._unfinished.has(number, digest)
        try:
            line = self._read(number, data)
        except BadLine as error:
            if not is_done:
                self._unfinished.add(number, digest, bad_line(number, error))
            return self._seen(True)
        if is_done:
            return self._seen(self._unfinished.failed(number))
        await self._free.acquire()
        group.create_task(self._answer(number, digest, line))

    def _read(self, number: int, data: bytes | None) -> BatchLine:
        if data is None:
            limit = self._state.config.max_body_bytes
            raise BadLine(f"it is longer than {limit} bytes (--max-body-bytes)")
        line = read_line(data, self._urls, self._told)
        first = self._names.setdefault(digest_of(line.custom_id.encode()), number)
        if first != number:
            raise BadLine(f"its custom_id is that of line {first} too", line.custom_id)
        return line

    async def _answer(self, number: int, digest: bytes, line: BatchLine) -> None:
        try:
            reply = await self._ask(line)
        finally:
            self._free.release()
        request_id = (reply.headers or {}).get(b"x-request-id", b"").decode()
        result = reply_line(line, reply.status, request_id, reply.body)
        self._unfinished.add(number, digest, result)
        self._seen(reply.status >= 400)

    async def _ask(self, line: BatchLine) -> LocalReply:
        for _ in range(MOST_TRIES):
            reply = await call(self._app, line.url, bytes(line.body), self._headers)
            if any(engine.state == "dead" for engine in self._state.engines):
                # It died, so what it says of this line is not about this line.
                raise next((e.error for e in self._state.engines if e.error), EngineDead("it died"))
            if reply.status not in BUSY:
                break
            await asyncio.sleep(_pause(reply))
        return reply


def _pause(reply: LocalReply) -> float:
    seconds = 1.0
    with contextlib.suppress(ValueError):
        seconds = float((reply.headers or {}).get(b"retry-after", b"1"))
    return min(max(seconds, 0.1), LONGEST_PAUSE)
