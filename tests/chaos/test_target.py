"""How the attacker talks to a server: its connections are used again where they can be."""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

from quire.chaos.target import HttpReply, HttpTarget, KeptConnections

REPLY = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 2\r\n"


class Scripted:
    """A server that ends each connection after so many replies.

    Args:
        replies: Of each connection.
        says: Whether its last reply on a connection tells that it will be closed.
    """

    def __init__(self, replies: int, says: bool) -> None:
        self.connections: list[asyncio.Task[None]] = []
        self._replies, self._says = replies, says

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(cast("asyncio.Task[None]", asyncio.current_task()))
        for left in reversed(range(self._replies)):
            if not await reader.readline():
                break
            await reader.readuntil(b"\r\n\r\n")
            closes = b"Connection: close\r\n" if self._says and not left else b""
            writer.write(REPLY + closes + b"\r\n{}")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _ask(server: Scripted, times: int) -> list[HttpReply]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        target = HttpTarget(f"http://127.0.0.1:{port}", "any")
        pool, sent = KeptConnections(target), target.head("GET", "/") + b"\r\n"
        replies = []
        for _ in range(times):
            replies.append(await pool.exchange(sent))
            await asyncio.sleep(0.01)  # an end of the connection arrives
        await pool.close()
        await asyncio.gather(*server.connections)
    return replies


def test_connections_are_used_again() -> None:
    for says in (False, True):
        server = Scripted(3, says)
        replies = asyncio.run(_ask(server, 9))
        assert [r.status for r in replies] == [429] * 9
        assert all(r.is_complete and r.body == b"{}" for r in replies)
        # One that ended unannounced is found out by the next request, which gets one of its own.
        assert len(server.connections) == 3 if says else 3 <= len(server.connections) < 9


def test_a_server_that_answers_nothing_is_told_so() -> None:
    replies = asyncio.run(_ask(Scripted(0, says=False), 3))
    assert [r.status for r in replies] == [0] * 3
