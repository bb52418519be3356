"""Framing of messages on a socket: four bytes of length, then msgpack. No pickle, ever."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec

HEADER = 4
MAX_FRAME = 2**30
"""Larger frames mean a broken peer, not a large message."""

_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """A message as one frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER, "little") + body


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
