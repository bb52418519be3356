"""The server under attack: its address, key and model, and requests to it as bytes.

Plain sockets, because most attacks are things that an HTTP library would not send. Knows no attack.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
MOST_BYTES: Final = 2**26
"""Of a reply. A longer one is cut, so that no server can fill the attacker's memory."""
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class HttpTarget:
    """A server.

    Args:
        url: Its base, with or without `/v1`.
        model: What requests ask for.
        key: Sent with each request.
        route: Which of the two ways to ask for text the server has.
    """

    url: str
    model: str
    key: str | None = None
    route: str = COMPLETIONS

    @property
    def host(self) -> str:
        """Name or address."""
        return urlsplit(self.url).hostname or ""

    @property
    def is_local(self) -> bool:
        """Whether it is this machine, so that an attack harms nobody else."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    async def connect(self, **how: Any) -> Pair:
        """A connection.

        Raises:
            OSError: the server does not take it.
        """
        parts = urlsplit(self.url)
        context = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if context else 80)
        return await asyncio.open_connection(self.host, port, ssl=context, **how)

    def path(self, path: str) -> str:
        """A path below the base."""
        return urlsplit(self.url).path.rstrip("/").removesuffix("/v1") + path

    def head(self, method: str, path: str, headers: str = "") -> bytes:
        """Request line and headers, without the empty line that ends them.

        Args:
            headers: Further lines, each with its end.
        """
        where = self.host if ":" not in self.host else f"[{self.host}]"
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        return (
            f"{method} {self.path(path)} HTTP/1.1\r\nHost: {where}\r\n{key}"
            f"Content-Type: application/json\r\n{headers}"
        ).encode("utf-8", "surrogatepass")

    def post(self, path: str, body: bytes, headers: str = "") -> bytes:
        """A whole request."""
        sized = f"Content-Length: {len(body)}\r\n{headers}"
        return self.head("POST", path, sized) + b"\r\n" + body

    def ask_for_text(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """The body of a request for text."""
        if self.route == CHAT:
            where: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        else:
            where = {"prompt": prompt}
        return {"model": self.model, **where, **fields}

    def long_stream(self, **fields: Any) -> bytes:
        """A whole request for many tokens, streamed."""
        asked: dict[str, Any] = {"max_tokens": 400, "stream": True, "temperature": 1}
        body = self.ask_for_text("Once upon a time", **(asked | fields))
        return self.post(self.route, json.dumps(body).encode())


@dataclass
class HttpReply:
    """What came back."""

    status: int = 0
    """0: the connection ended without an answer; -1: nothing came in time."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    """Without chunk frames."""
    seconds: float = 0.0
    """Until the end."""
    first: float | None = None
    """Seconds until the first byte."""
    is_complete: bool = False
    """It ended as its headers said, and not because the connection broke."""

    @property
    def text(self) -> str:
        """Of a reply with choices, whole or streamed: what the first one says; with the finish
        reason and the kind of any error, so that a cut reply differs from a whole one."""
        parts: list[str] = []
        for event in self.events():
            if event.get("error"):
                parts.append(f"<error {str(event['error'])[:200]}>")
            for choice in event.get("choices") or ():
                said = choice.get("delta") or choice.get("message") or choice
                parts.append(said.get("text") or said.get("content") or "")
                if reason := choice.get("finish_reason"):
                    parts.append(f"<{reason}>")
        return "".join(parts)

    def events(self) -> list[dict[str, Any]]:
        """The JSON objects in it."""
        lines = self.body.split(b"\n")
        datas = [line[5:] for line in lines if line.startswith(b"data:")]
        found = []
        for data in datas or [self.body]:
            try:
                value = json.loads(data)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
        return found

    @property
    def is_answer(self) -> bool:
        """Whether it is a whole answer of a model: 200, with an end, without an error."""
        if self.status != 200 or not self.is_complete:
            return False
        events = self.events()
        ends = [c.get("finish_reason") for e in events for c in e.get("choices") or ()]
        return any(ends) and not any(e.get("error") for e in events)


async def exchange(
    target: HttpTarget, sent: bytes, seconds: float = 60, *, half_close: bool = False
) -> HttpReply:
    """Send bytes on a connection of their own, and read one reply.

    Args:
        sent: Anything.
        seconds: Silence after which the server counts as hanging.
        half_close: Say that no more will be sent.
    """
    reply, writer = HttpReply(), None
    try:
        with _noted(reply) as start:
            reader, writer = await target.connect(limit=2**20)
            writer.write(sent)
            if half_close and writer.can_write_eof():
                writer.write_eof()
            await _read(reader, reply, seconds, start)
    finally:
        if writer is not None:
            writer.transport.abort()
    return reply


class KeptConnections:
    """Connections that are used again, as most clients' are: to open one for each request costs
    this side and the server more than a refusal does.

    Args:
        target: Where they go.
    """

    def __init__(self, target: HttpTarget) -> None:
        self._target = target
        self._idle: list[Pair] = []

    async def exchange(self, sent: bytes, seconds: float = 60) -> HttpReply:
        """Send a well-formed request and read its reply.

        Args:
            seconds: Silence after which the server counts as hanging.
        """
        reply, pair = HttpReply(), self._idle.pop() if self._idle else None
        is_new = pair is None
        try:
            with _noted(reply) as start:
                pair = pair or await self._target.connect(limit=2**20)
                pair[1].write(sent)
                await _read(pair[0], reply, seconds, start)
        finally:
            if pair is not None:
                self._put_back(pair, reply)
        if reply.status == 0 and not is_new:  # the server had closed it meanwhile, as it may
            return await exchange(self._target, sent, seconds)
        return reply

    def _put_back(self, pair: Pair, reply: HttpReply) -> None:
        if reply.is_complete and reply.headers.get("connection") != "close":
            self._idle.append(pair)
        else:
            pair[1].transport.abort()

    async def close(self) -> None:
        """End the connections."""
        for _, writer in self._idle:
            writer.transport.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # a socket closes in the turn after


@contextlib.contextmanager
def _noted(reply: HttpReply) -> Iterator[float]:
    """Gives the time it begins; what goes wrong stands in the reply, with what came until then."""
    start = time.monotonic()
    try:
        yield start
    except TimeoutError:
        reply.status = -1
    except (OSError, ValueError, IndexError, asyncio.IncompleteReadError):
        pass  # it was cut, or nobody takes the connection
    reply.seconds = time.monotonic() - start


async def ask(
    target: HttpTarget, body: dict[str, Any], seconds: float = 120, headers: str = ""
) -> HttpReply:
    """One well-formed request for text, and its reply."""
    sent = target.post(target.route, json.dumps(body).encode(), "Connection: close\r\n" + headers)
    return await exchange(target, sent, seconds)


async def get(target: HttpTarget, path: str, seconds: float = 30) -> HttpReply:
    """A GET."""
    return await exchange(
        target, target.head("GET", path, "Connection: close\r\n") + b"\r\n", seconds
    )


async def _read(
    reader: asyncio.StreamReader, reply: HttpReply, seconds: float, start: float
) -> None:
    async def line() -> bytes:
        async with asyncio.timeout(seconds):  # `wait_for` would make a task for each line
            return await reader.readline()

    first = await line()
    reply.first = time.monotonic() - start
    if not first.startswith(b"HTTP/1."):
        return
    reply.status = int(first.split()[1])
    while (one := await line()) not in (b"\r\n", b"\n", b""):
        name, _, value = one.decode("latin-1").partition(":")
        reply.headers[name.strip().lower()] = value.strip()
    parts: list[bytes] = []
    try:
        if reply.headers.get("transfer-encoding") == "chunked":
            while (size := int((await line()).split(b";")[0], 16)) and len(parts) < MOST_BYTES:
                parts.append(await asyncio.wait_for(reader.readexactly(size), seconds))
                await line()
            reply.is_complete = True
        elif (length := reply.headers.get("content-length")) is not None:
            parts.append(await asyncio.wait_for(reader.readexactly(int(length)), seconds))
            reply.is_complete = True
        else:
            parts.append(await asyncio.wait_for(reader.read(MOST_BYTES), seconds))
            reply.is_complete = True
    finally:
        reply.body = b"".join(parts)
