"""Frames arrive whole and in order, whoever sends them, and however slowly they are read."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from patience import PATIENCE, wait_for
from quire.engine.cores.sender import Sender


@pytest.fixture
def ends() -> Iterator[tuple[Sender, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE)
    with ours, theirs:
        yield Sender(ours, nullcontext), theirs


def read(sock: socket.socket, count: int, most: int = 1 << 20) -> bytes:
    found = bytearray()
    while len(found) < count:
        found += sock.recv(min(most, count - len(found)))
    return bytes(found)


def test_what_is_read_at_once_needs_no_thread(ends: tuple[Sender, socket.socket]) -> None:
    sender, theirs = ends
    for number in range(100):
        frame = bytes([number]) * (1 + number * 50)
        sender.put(frame)
        assert read(theirs, len(frame)) == frame
    assert sender._thread is None
    sender.close(PATIENCE)


def test_nobody_waits_for_a_reader_that_does_not_read(ends: tuple[Sender, socket.socket]) -> None:
    sender, theirs = ends
    rng = random.Random(1)
    frames = [rng.randbytes(rng.choice([5, 3000, 1 << 20])) for _ in range(60)]
    for frame in frames:
        sender.put(frame)
    assert sender._thread is not None
    assert read(theirs, sum(map(len, frames))) == b"".join(frames)
    wait_for(lambda: sender._num_sent == sender._num_left)
    sender.put(b"at once again")
    assert sender._left.empty() and read(theirs, 13) == b"at once again"


def test_the_order_holds_while_both_send(ends: tuple[Sender, socket.socket]) -> None:
    """A reader that now lags and now waits: the thread ends its work while frames are put."""
    sender, theirs = ends
    rng = random.Random(2)
    frames = [rng.randbytes(rng.choice([7, 900, 150_000])) for _ in range(3000)]
    wanted, found = sum(map(len, frames)), []
    reader = threading.Thread(target=lambda: found.append(read(theirs, wanted, 1 << 16)))
    reader.start()
    for frame in frames:
        sender.put(frame)
    sender.close(PATIENCE)
    reader.join(PATIENCE)
    assert found == [b"".join(frames)]
