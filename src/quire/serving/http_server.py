"""HTTP over uvicorn, whose one door this is: limits on headers, its log, no signal handlers.

Knows neither routes nor the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import ssl
from collections.abc import Iterator
from typing import Any, Final, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.serving.exchange import NO_DESCRIPTORS, PIPE
from quire.serving.limits import HEADER_BYTES
from quire.serving.unread import HIGH_WATER, Unread

HEADER_SECONDS: Final = 30.0
"""How long a request line with its headers may take, and a new connection until its first."""
REQUEST_LINE: Final = 16
"""Bytes of a request line beside its target, about."""
KEEP_ALIVE_SECONDS: Final = 65
SPARE_DESCRIPTORS: Final = 16
"""Connections that take one of the last so many descriptors are told to come back later, probes
excepted. Without any, connections could only be closed, and no core could be replaced."""
SCARCE_HEADER_SECONDS: Final = 1.0
"""`HEADER_SECONDS` of such a connection."""


def adopt_uvicorn_logs(level: int = logging.INFO) -> None:
    """Send uvicorn's warnings where ours go. Its greetings, which are all it logs at INFO, are
    dropped unless a lower level is set."""
    logs = logging.getLogger("uvicorn")
    logs.handlers = list(logging.getLogger("quire").handlers)
    logs.propagate = not logs.handlers
    logs.setLevel(logging.WARNING if level == logging.INFO else level)


class _Pipe:
    """See `exchange.ReplyPipe`: writes as uvicorn does, without the messages of ASGI."""

    __slots__ = ("_transport", "is_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_paused = False
        """Whether the client has yet to take what was written."""

    def write_chunk(self, data: bytes) -> bool:
        """Write one chunk of a body."""
        if self.is_paused or self._transport.is_closing():
            return False
        if data:
            self.send_chunk(data)
        return True

    def send_chunk(self, data: bytes) -> None:
        """Write one chunk of a body, or keep it until that can be done."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on the size of headers and the time they may take."""

    def __init__(self, unread: Unread, **options: Any) -> None:
        super().__init__(**options)
        self._unread = unread

    _header_bytes = _unfinished_bytes = 0
    _header_seconds = HEADER_SECONDS
    _in_headers = True
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._pipe = _Pipe(transport)
        transport.set_write_buffer_limits(high=HIGH_WATER)
        if _nearly_last(transport):
            self.app = _marked(self.app)
            self._header_seconds = SCARCE_HEADER_SECONDS
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._unread.release(self.transport)
        if (scope := getattr(self, "scope", None)) is not None:
            del scope[PIPE]  # a circle
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._pipe.is_paused = True
        self._unread.grow(self.transport)

    def resume_writing(self) -> None:
        self._unread.release(self.transport)
        self._pipe.is_paused = False
        super().resume_writing()

    @property
    def is_stuck(self) -> bool:
        """Whether nothing is written until the client has read."""
        cycle = self.cycle
        return self.flow.write_paused or cycle is None or cycle.response_complete

    def on_message_begin(self) -> None:
        self._in_headers, self._header_bytes, self._unfinished_bytes = True, 0, 0
        self._start_clock()
        super().on_message_begin()
        self.scope[PIPE] = self._pipe  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url) + REQUEST_LINE)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES.most:
            raise OverflowError  # the parser stops, and uvicorn calls `send_400_response`

    def send_400_response(self, msg: str) -> None:
        if self._header_bytes > HEADER_BYTES.most:
            rule = HEADER_BYTES.rule.format(most=HEADER_BYTES.most)
            msg = f"{rule}, got {self._header_bytes} or more."
        super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_clock()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():
            # The parser tells of a header when it is complete; this one may never be.
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > HEADER_BYTES.most:
                self._header_bytes = max(self._header_bytes, self._unfinished_bytes)
                self.send_400_response("")

    def _start_clock(self) -> None:
        self._stop_clock()
        self._deadline = self.loop.call_later(self._header_seconds, self.transport.close)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _nearly_last(transport: asyncio.BaseTransport) -> bool:
    """Whether hardly any descriptors are left: the kernel gives the lowest one that is free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    sock = transport.get_extra_info("socket")
    return limit != resource.RLIM_INFINITY and sock.fileno() >= limit - SPARE_DESCRIPTORS


def _marked(app: Any) -> Any:
    """An application whose requests say that there are hardly any descriptors left."""

    async def marked(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, NO_DESCRIPTORS: True}, receive, send)

    return marked


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, because the server process has its own."""

    def __init__(self, config: uvicorn.Config, unread: Unread) -> None:
        super().__init__(config)
        self._unread = unread

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to exit."""
        watching = asyncio.ensure_future(self._unread.watch(self._connections))
        try:
            await super().serve(sockets)
        finally:
            watching.cancel()

    def _connections(self) -> list[_Protocol]:
        return cast("list[_Protocol]", list(self.server_state.connections))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self.server_state.connections)

    async def accepting(self) -> None:
        """Return when connections are accepted."""
        while not self.started:
            await asyncio.sleep(0.001)

    def stop_accepting(self) -> None:
        """Close the listening socket, and serve the connections that there are."""
        for server in self.servers:
            server.close()

    def unsent(self) -> bool:
        """Whether bytes of replies wait for clients that read slowly. A connection that is being
        closed counts, because it closes only when its bytes have been sent."""
        connections = self.server_state.connections
        return any(one.transport.get_write_buffer_size() for one in connections)


def http_server(app: Any, unread: Unread, tls: ssl.SSLContext | None = None) -> HttpServer:
    """uvicorn for an ASGI application, with the limits of this module; `unread` counts what clients
    do not take."""
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", functools.partial(_Protocol, unread)),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
    )
    config.load()
    config.ssl = tls  # uvicorn would make a context of its own from files
    return HttpServer(config, unread)
