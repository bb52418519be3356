"""Framing of messages on a socket: four bytes of length, then msgpack. No pickle, ever.

A frame is never so large that its receiver takes the sender for a broken peer: what could be is cut
into several messages (`quire.engine.cores.parts`), or refused with `MessageTooLarge`.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

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


def _length(header: bytes) -> int:
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


async def receive_async(reader: asyncio.StreamReader) -> bytes | None:
    """The same for asyncio."""
    try:
        header = await reader.readexactly(HEADER)
        return await reader.readexactly(_length(header))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
