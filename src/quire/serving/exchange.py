"""One HTTP request and its reply, directly on ASGI: reads the body within limits, replies, streams.

Knows no route and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from typing import Any, Final, TypeVar

import msgspec

from quire.errors import InvalidRequest, PayloadTooLarge, QuireError
from quire.serving import errors
from quire.serving.deadline import Deadline
from quire.serving.decode import Unsupported, decode, show
from quire.serving.dialect import OPENAI
from quire.serving.errors import RequestTimeout, UnsupportedMediaType
from quire.serving.server_state import ServerState

Scope = MutableMapping[str, Any]
T = TypeVar("T", bound=msgspec.Struct)
KEY: Final = "quire.exchange"
"""Key of the exchange in the ASGI scope."""
JSON: Final = b"application/json"
BODY_SECONDS: Final = 60.0
"""Seconds that a whole body may take to arrive."""
DISCARD_TIMES: Final = 8
"""Of a body that is too long, at most this many times the limit is read and discarded."""
DISCARD_SECONDS: Final = 5.0
LONGEST_DEADLINE: Final = 86_400_000
"""Milliseconds: a day."""
_REQUEST_ID: Final = re.compile(rb"[!-~]{1,128}")
_CLOSE: Final = (b"connection", b"close")
_UNBUFFERED: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Asks proxies to pass on a stream without buffering."""


class Exchange:
    """A request being answered."""

    def __init__(self, scope: Scope, receive: Any, send: Any, state: ServerState) -> None:
        self.scope = scope
        self.state = state
        self.dialect = OPENAI
        """The route's, or that of the route above an unknown path."""
        self.request_id = uuid.uuid4().hex
        self.deadline: Deadline | None = None
        """When the caller wants the reply to be complete."""
        self.status: int | None = None
        """Status of the reply once it has started."""
        self.finished = False
        self.bytes_in = self.bytes_out = 0
        """Bytes of bodies, read and sent."""
        self.before_end: Callable[[], None] | None = None
        """Called once, before the last bytes leave: whoever reads the reply finds it counted."""
        self._accepted = False
        self._more_body = True
        self._receive = receive
        self._send = send

    def header(self, name: bytes) -> bytes | None:
        """First value of a request header; `name` in lower case."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    def trace_headers(self) -> dict[str, str] | None:
        """The caller's trace context, if it sent one."""
        found = {
            name.decode(): value.decode("latin-1")
            for name in (b"traceparent", b"tracestate")
            if (value := self.header(name)) is not None
        }
        return found or None

    def client(self, user: str | None) -> str:
        """The client that a request counts for under the `fair` policy: the key if there are
        several, otherwise the request's `user`."""
        return self.state.keys.client(self.scope["headers"]) or user or ""

    def adopt_request_id(self) -> None:
        """Take the caller's `X-Request-Id`, if there is one.

        Raises:
            InvalidRequest: it is too long or not made of visible ASCII.
        """
        given = self.header(b"x-request-id")
        if given is None:
            return
        if not _REQUEST_ID.fullmatch(given):
            raise InvalidRequest(
                "X-Request-Id must be 1 to 128 visible ASCII characters without spaces, got "
                f"{len(given)} bytes.",
                param="X-Request-Id",
            )
        self.request_id = given.decode("ascii")

    def adopt_deadline(self) -> None:
        """Take the caller's `X-Request-Deadline-Ms`, if there is one; it counts from now.

        Raises:
            InvalidRequest: it is not a whole number of milliseconds up to a day.
        """
        given = self.header(b"x-request-deadline-ms")
        if given is None:
            return
        if not (given.isdigit() and len(given) < 20 and 0 < int(given) <= LONGEST_DEADLINE):
            raise InvalidRequest(
                f"X-Request-Deadline-Ms must be an integer from 1 to {LONGEST_DEADLINE}, got "
                f"{show(given.decode('latin-1'))}.",
                param="X-Request-Deadline-Ms",
            )
        self.deadline = Deadline(int(given))

    async def body(self) -> bytes:
        """The request's body, which must be declared as JSON.

        Raises:
            UnsupportedMediaType: it is not.
            PayloadTooLarge: it is longer than the server reads; noticed while it arrives.
            RequestTimeout: it takes more than a minute to arrive.
            ClientDisconnect: the client has disconnected.
        """
        given = (self.header(b"content-type") or b"").decode("latin-1")
        if given.partition(";")[0].strip().lower() != "application/json":
            raise UnsupportedMediaType(given)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._read()
        except PayloadTooLarge:
            await self._discard()
            raise
        except TimeoutError:
            raise RequestTimeout(
                f"The body must arrive within {BODY_SECONDS:.0f} seconds."
            ) from None

    async def record(self, kind: type[T], unsupported: Mapping[str, Unsupported]) -> T:
        """The request's body as a typed record.

        A server that accepts no requests at all says so before it reads the body.

        Raises:
            ServiceUnavailable: no model takes requests.
            InvalidRequest: the body is not such a record, or the deadline in the headers is bad.
            RequestError: as `body` raises it.
        """
        self.state.check_open()
        self.adopt_deadline()
        body = await self.body()
        self._accept()
        return decode(kind, body, unsupported)

    def _accept(self) -> None:
        """From here on a drain waits for the reply."""
        if not self._accepted:
            self._accepted = True
            self.state.answering += 1

    def leave(self) -> None:
        """The reply has ended, or will not come."""
        if self._accepted:
            self._accepted = False
            self.state.answering -= 1

    async def _read(self) -> bytes:
        limit = self.state.config.max_body_bytes
        declared = self.header(b"content-length") or b"0"
        if declared.isdigit() and int(declared[:20]) > limit:
            raise PayloadTooLarge(f"The body may have at most {limit} bytes, got {int(declared)}.")
        chunks, size, more = [], 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            more = self._more_body = message.get("more_body", False)
            size += len(chunk)
            self.bytes_in = size
            if size > limit:
                raise PayloadTooLarge(f"The body may have at most {limit} bytes, got more.")
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _discard(self) -> None:
        """Read the rest of a body that is too long, within limits. A client that is still sending
        when the connection closes would see a broken connection instead of the reply."""
        if not self.bytes_in and b"100-continue" in (self.header(b"expect") or b"").lower():
            return  # it waits for leave to send
        left = DISCARD_TIMES * self.state.config.max_body_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while self._more_body and left > 0:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    self._more_body = message.get("more_body", False)
                    left -= len(message.get("body", b""))

    async def reply(
        self,
        body: bytes = b"",
        status: int = 200,
        content_type: bytes = JSON,
        headers: errors.Headers | None = None,
    ) -> None:
        """Send a whole reply."""
        head = [(b"content-length", str(len(body)).encode()), *(headers or ())]
        if body:
            head.append((b"content-type", content_type))
        await self._start(status, head)
        self.finished = True
        await self._send_body(body, more=False)

    async def fail(self, error: QuireError) -> None:
        """Reply with an error, in the dialect's format."""
        body = self.dialect.error(error, self.request_id)
        await self.reply(body, error.status, headers=errors.headers(error))

    async def start_stream(self) -> None:
        """Start a stream, of the content type that the dialect has."""
        await self._start(200, [(b"content-type", self.dialect.stream_type), *_UNBUFFERED])

    async def write(self, frames: bytes) -> None:
        """Send finished frames of the stream; waits while the client reads slowly."""
        await self._send_body(frames, more=True)

    async def end_stream(self, frames: bytes = b"") -> None:
        """Send the last frames."""
        self.finished = True
        await self._send_body(frames, more=False)

    async def _send_body(self, data: bytes, more: bool) -> None:
        if self.scope["method"] != "HEAD":  # whose body stays here
            self.bytes_out += len(data)
        if not more and self.before_end is not None:
            tell, self.before_end = self.before_end, None
            tell()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _start(self, status: int, headers: errors.Headers) -> None:
        self.status = status
        if self.state.config.enable_request_id_headers:
            told = self.request_id.encode()
            headers += [(name, told) for name in self.dialect.id_headers]
        if (self.state.draining or self.state.handed_over) and _CLOSE not in headers:
            headers.append(_CLOSE)  # the next request is for the process that comes after this one
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, and cancel it as soon as the client disconnects. Call it after `body()`."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            # A complete reply also counts as a disconnect: then let `work` clean up in peace.
            if task.done() or self.finished:
                await task
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class ClientDisconnect(Exception):
    """The client has disconnected, so there is nobody to reply to."""
