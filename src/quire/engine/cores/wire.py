"""Framing of messages on a socket: four bytes of length, then msgpack. No pickle, ever.

A frame is never so large that its receiver takes the sender for a broken peer: what could be is cut
into several messages (`quire.engine.cores.parts`), or refused with `MessageTooLarge`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec

from quire.errors import InvalidRequest

HEADER: Final = 4
PART_BYTES: Final = 2**20
"""Messages that can be cut are cut into parts of at most this size (1 MiB), so that neither side is
busy with one message for long: numbers of this size are read in some 10 ms."""
MAX_FRAME: Final = 2**28
"""Bytes (256 MiB). No sender makes larger frames, so a larger length means a broken peer."""

_encoder = msgspec.msgpack.Encoder()


class MessageTooLarge(InvalidRequest):
    """A message would make a larger frame than any receiver takes."""


def encode(message: Any) -> bytes:
    """A message as one frame.

    Raises:
        MessageTooLarge: the frame would be larger than `MAX_FRAME`.
        TypeError, ValueError, OverflowError, RecursionError: msgpack cannot hold what is in it.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise MessageTooLarge(
            f"a message of {len(body)} bytes is over the limit of {MAX_FRAME} bytes for a message "
            "between the API process and the engine core."
        )
    return len(body).to_bytes(HEADER, "little") + body


def size_of(part: Any) -> int:
    """Bytes that a part of a message takes."""
    return len(_encoder.encode(part))


def _length(header: bytes | bytearray) -> int:
    length = int.from_bytes(header, "little")
    if length > MAX_FRAME:
        raise ConnectionError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
    return length


def receive(sock: socket.socket) -> bytes | None:
    """The next frame's body; None when the peer has closed."""
    header = _receive_exactly(sock, HEADER)
    return None if header is None else _receive_exactly(sock, _length(header))


def _receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    chunks: list[bytes] = []
    while count:
        chunk = sock.recv(min(count, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


class Channel(asyncio.Protocol):
    """The event loop's end of a socket: gives each frame's body, as soon as it is there, to whoever
    listens. A broken peer, of whom a frame is too long, is cut off."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        """Once it is connected."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the peer has closed, and everything it said has been given."""
        self._listener: Callable[[bytes], None] | None = None
        self._arrived = bytearray()
        self._awaited = HEADER
        # bytes without which nothing can be given

    def listen(self, listener: Callable[[bytes], None] | None) -> None:
        """Have somebody get the frames from now on, and those that nobody has got; `None`: they
        wait. What it raises is its own affair."""
        self._listener = listener
        self._give()

    async def frame(self) -> bytes | None:
        """The next frame's body; None when the peer has closed."""
        found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def take(frame: bytes) -> None:
            self._listener = None
            found.set_result(frame)

        self.listen(take)
        try:
            await asyncio.wait((found, self.closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._listener = None
        return found.result() if found.done() else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of `asyncio.Protocol`."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Part of `asyncio.Protocol`."""
        self._arrived += data
        self._give()

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of `asyncio.Protocol`."""
        if not self.closed.done():
            self.closed.set_result(None)

    def _give(self) -> None:
        arrived = self._arrived
        while self._listener is not None and len(arrived) >= self._awaited:
            try:
                end = HEADER + _length(arrived[:HEADER])
            except ConnectionError:
                arrived.clear()
                return self.transport.abort()
            if len(arrived) < end:
                self._awaited = end
                return
            frame = bytes(memoryview(arrived)[HEADER:end])
            del arrived[:end]
            self._awaited = HEADER
            self._listener(frame)
