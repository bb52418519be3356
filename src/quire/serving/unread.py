"""Bytes that clients have not taken from their connections: counted, and waited for not forever.

What the kernel does not take of a reply stays in memory, all of it if the reply is whole. These
bytes count towards `--max-buffered-bytes` together with the outputs that wait for slow readers; if
there are too many, whoever holds most is ended, be it a stream or a connection. A connection whose
client takes nothing for `--write-timeout` seconds is closed. Knows neither HTTP nor routes.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from quire.engine.frontend.stream import StreamBuffers
from quire.logger import get_logger

logger = get_logger(__name__)

HIGH_WATER: Final = 4096
"""Bytes of a connection that are not counted. Without any, headers and the body after them would be
two packets."""
LOOKS: Final = 4
"""Looks at all connections within the time that a client has."""


class WatchedConnection(Protocol):
    """What is watched."""

    transport: asyncio.Transport

    @property
    def is_stuck(self) -> bool:
        """Whether nothing is written until the client has read; then unsent bytes only shrink."""
        ...


class Unread:
    """The unsent bytes of all connections.

    Args:
        seconds: That a client may take nothing; 0: any time.
        buffers: Where the bytes are counted; asked when there are some, `None` before the engine is
            there.
        count_timeout: Called for each connection that is closed because its time is over.
    """

    def __init__(
        self,
        seconds: float,
        buffers: Callable[[], StreamBuffers | None],
        count_timeout: Callable[[], None],
    ) -> None:
        self._seconds = seconds
        self._buffers = buffers
        self._count_timeout = count_timeout
        self._counted: dict[asyncio.Transport, StreamBuffers] = {}
        self._looked: dict[asyncio.Transport, tuple[int, float]] = {}
        # how much was unsent when it last changed, and when that was

    def grow(self, transport: asyncio.Transport) -> None:
        """A connection holds bytes that the kernel does not take; it writes no more until it has
        taken them."""
        buffers = self._buffers()
        if buffers is not None and transport not in self._counted:
            self._counted[transport] = buffers
            held = _Held(transport)
            buffers.grow(held, transport.get_write_buffer_size())

    def release(self, transport: asyncio.Transport) -> None:
        """It holds none any more, or is lost."""
        buffers = self._counted.pop(transport, None)
        if buffers is not None:
            buffers.release(_Held(transport))

    async def watch(self, connections: Callable[[], Iterable[WatchedConnection]]) -> None:
        """Close connections whose clients take nothing, until cancelled."""
        while self._seconds:
            await asyncio.sleep(self._seconds / LOOKS)
            self.look(connections(), asyncio.get_running_loop().time())

    def look(self, connections: Iterable[WatchedConnection], now: float) -> None:
        """Close those whose time is over."""
        before, self._looked = self._looked, {}
        for connection in connections:
            transport = connection.transport
            unsent = transport.get_write_buffer_size()
            if not unsent or not connection.is_stuck:
                continue
            unsent += _in_kernel(transport)
            known, since = before.get(transport, (-1, now))
            since = since if unsent == known else now
            if now - since < self._seconds:
                self._looked[transport] = unsent, since
                continue
            self._count_timeout()
            logger.warning(
                "a client took nothing for %.0f s with %d bytes waiting: its connection is closed",
                now - since,
                unsent,
            )
            transport.abort()


class _Held:
    """The bytes of one connection, as a holder of `StreamBuffers`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other._transport is self._transport

    def __hash__(self) -> int:
        return hash(self._transport)

    def end_slow(self, held: int, limit: int) -> None:
        """Close the connection. An error could not be sent: the client reads nothing."""
        logger.warning(
            "a client left %d bytes unread, and all may leave %d (--max-buffered-bytes): its "
            "connection is closed",
            held,
            limit,
        )
        self._transport.abort()


def _in_kernel(transport: asyncio.Transport) -> int:
    """Bytes that the kernel has, and the client's has not confirmed. They shrink while a client
    reads slowly, long before the kernel takes more."""
    socket = transport.get_extra_info("socket")
    try:
        found = fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, b"\0" * 4)
    except (OSError, ValueError):
        return 0  # closed meanwhile, or a kind of socket without the answer
    return int(struct.unpack("i", found)[0])
