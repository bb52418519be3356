"""Clients that take nothing, over real sockets: closed after a time, and bounded in bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from patience import PATIENCE, wait_for
from quire.config import ServerConfig
from quire.engine.frontend.stream import StreamBuffers
from quire.serving.http_server import http_server
from quire.serving.listener import bind
from quire.serving.unread import HIGH_WATER, Unread

LONG = 32 * 2**20
"""More than any kernel keeps for a connection here."""
TEXT = b"x" * LONG
Run = Callable[..., "Serving"]


class Serving:
    """uvicorn in a thread, with an application that sends a lot: whole, or in pieces."""

    def __init__(self, seconds: float, limit: int | None, uds: str | None, loop: str) -> None:
        self.ended_slow = self.timeouts = self.lost = 0
        self.buffers = StreamBuffers(limit, self._count_slow)
        unread = Unread(seconds, lambda: self.buffers, self._count_timeout)
        config = ServerConfig(port=0, uds=uds)
        self.listener = bind(config)
        self.server = http_server(self.app, unread)
        self._loop = loop
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started)

    def _count_slow(self) -> None:
        self.ended_slow += 1

    def _count_timeout(self) -> None:
        self.timeouts += 1

    def _run(self) -> None:
        factory = None
        if self._loop == "uvloop":
            uvloop = pytest.importorskip("uvloop")
            factory = uvloop.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(self.server.serve([self.listener]))

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        pieces = [TEXT] if scope["path"] == "/whole" else [TEXT[: 2**16]] * (LONG // 2**16)
        pieces = [b"small"] if scope["path"] == "/small" else pieces
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i, piece in enumerate(pieces):
            more = i < len(pieces) - 1
            await send({"type": "http.response.body", "body": piece, "more_body": more})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.lost += 1

    def connect(self, path: str) -> socket.socket:
        kind = self.listener.family
        client = socket.socket(kind, socket.SOCK_STREAM)
        client.settimeout(PATIENCE)
        client.connect(self.listener.getsockname())
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return client

    def stop(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(PATIENCE)
        self.listener.close()


@pytest.fixture
def run() -> Iterator[Run]:
    with contextlib.ExitStack() as stack:

        def make(
            seconds: float = 0.0,
            limit: int | None = None,
            uds: str | None = None,
            loop: str = "uvloop",
        ) -> Serving:
            made = Serving(seconds, limit, uds, loop)
            stack.callback(made.stop)
            return made

        yield make


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("path", ["/whole", "/pieces"])
def test_a_client_that_takes_nothing_is_closed(run: Run, path: str, loop: str) -> None:
    serving = run(seconds=0.2, loop=loop)
    with serving.connect(path):
        wait_for(lambda: serving.timeouts)
        wait_for(lambda: not serving.server.num_connections)
        assert serving.buffers.num_bytes == 0
    assert serving.timeouts == 1


def test_over_a_unix_socket_too(run: Run, tmp_path: Any) -> None:
    serving = run(seconds=0.2, uds=str(tmp_path / "socket"))
    with serving.connect("/pieces"):
        wait_for(lambda: serving.timeouts)


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
def test_a_client_that_reads_slowly_is_not(run: Run, path: str) -> None:
    serving = run(seconds=2.0)  # half of what reading takes
    with serving.connect(path) as client:
        wait_for(lambda: serving.buffers.num_bytes)
        for _ in range(100):  # the server's kernel has so much that it takes no more meanwhile
            assert client.recv(2**14)
            time.sleep(0.04)
        assert serving.timeouts == 0 and serving.server.num_connections == 1


def test_an_idle_connection_is_not(run: Run) -> None:
    serving = run(seconds=0.1)
    with serving.connect("/small") as client:
        assert b"small" in client.recv(2**16)
        time.sleep(0.5)
        client.sendall(b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in client.recv(2**16)
    assert serving.timeouts == 0


def test_without_a_limit_nobody_is_closed(run: Run) -> None:
    serving = run(seconds=0.0)
    with serving.connect("/whole"):
        wait_for(lambda: serving.buffers.num_bytes > LONG // 2)
        time.sleep(0.3)
        assert serving.server.num_connections == 1


def test_unsent_bytes_count_and_the_largest_goes(run: Run) -> None:
    serving = run(limit=LONG + LONG // 2)
    with serving.connect("/pieces") as small, serving.connect("/whole"):
        wait_for(lambda: serving.buffers.num_bytes > LONG // 2)
        assert serving.buffers.num_bytes < serving.buffers.limit
        with serving.connect("/whole"):
            wait_for(lambda: serving.ended_slow)
            wait_for(lambda: serving.server.num_connections == 2)
            assert serving.ended_slow == 1
            received = b""
            while received.count(b"x") < LONG:  # the small one was left alone
                assert (piece := small.recv(2**20))
                received += piece


def test_what_is_read_counts_no_more(run: Run) -> None:
    serving = run(limit=2 * LONG)
    for _ in range(3):
        with serving.connect("/whole") as client:
            wait_for(lambda: serving.buffers.num_bytes)
            received = 0
            while received < LONG:
                received += len(client.recv(2**20))
            wait_for(lambda: serving.buffers.num_bytes == 0)
    assert serving.ended_slow == 0


def test_pieces_wait_for_the_client(run: Run) -> None:
    """One piece at most is in the transport, whatever the client does."""
    serving = run()
    with serving.connect("/pieces"):
        wait_for(lambda: serving.buffers.num_bytes)
        time.sleep(0.2)
        (connection,) = serving.server.server_state.connections
        assert connection.transport.get_write_buffer_size() <= 2**16 + HIGH_WATER + 64
