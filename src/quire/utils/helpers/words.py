"""What a server and its helper processes say to each other, over a socket pair: a length of four
bytes, then msgpack. Neither side learns anything of the other but this."""

from __future__ import annotations

import socket
import struct
from typing import Final

import msgspec

_LENGTH: Final = struct.Struct("!I")


class HelperLimits(msgspec.Struct, frozen=True):
    """What one piece of work may take; the kernel enforces it."""

    cpu_seconds: float = 2.0
    """Of the processor. Complex grammars take a tenth of a second, long conversations less."""
    wall_seconds: float = 8.0
    """On the clock, where the machine is busy with other things."""
    memory: int = 2**30
    """Address space beyond that of the process it begins in, in bytes."""


def send(sock: socket.socket, word: object) -> None:
    """Send one word."""
    body = msgspec.msgpack.encode(word)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket) -> bytes | None:
    """The next word, encoded; None at the end."""
    head = _exactly(sock, _LENGTH.size)
    return None if head is None else _exactly(sock, _LENGTH.unpack(head)[0])


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(count - len(parts), 2**20))
        if not part:
            return None
        parts += part
    return bytes(parts)
