"""Comment lines for streams that have nothing to say, so that proxies do not cut them.

A proxy closes a connection on which nothing has come for a while (nginx: 60 seconds). A stream is
silent while its request waits for its turn, while a long prompt is computed, and while an engine
core is replaced. Clients skip lines that begin with a colon, as the standard of server-sent events
asks. Knows no engine, and nothing of what is in the frames.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Final, Protocol

from quire.config import ServerConfig

COMMENT: Final = b": keep-alive\n\n"
_EVENTS: Final = b"text/event-stream"


class Connection(Protocol):
    """Where a stream is written to."""

    bytes_out: int
    """Written so far."""

    @property
    def config(self) -> ServerConfig:
        """The server's."""
        ...

    async def write_between(self, frames: bytes) -> None:
        """Write whole frames, not within others."""
        ...


@contextlib.contextmanager
def kept_alive(connection: Connection, stream_type: bytes) -> Iterator[None]:
    """While the block runs, write a comment whenever the stream was silent for as long as
    `ServerConfig.stream_keep_alive` says. Other formats than server-sent events have no comments,
    so their streams get none."""
    seconds = connection.config.stream_keep_alive
    if not seconds or not stream_type.startswith(_EVENTS):
        yield
        return
    keeper = _Keeper(connection, seconds)
    try:
        yield
    finally:
        keeper.stop()


class _Keeper:
    """One timer per stream looks at how much has been written: a token costs nothing."""

    def __init__(self, connection: Connection, seconds: float) -> None:
        self._connection = connection
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._writing: asyncio.Task[None] | None = None
        self._wait()

    def stop(self) -> None:
        """Write no more. What a slow reader has kept from being written so far is dropped."""
        self._timer.cancel()
        if self._writing is not None:
            self._writing.cancel()

    def _wait(self) -> None:
        self._written = self._connection.bytes_out
        self._timer = self._loop.call_later(self._seconds, self._look)

    def _look(self) -> None:
        # Frames are written whole, so a comment never gets into one. A reader who does not take
        # what was written keeps one comment waiting, not more.
        silent = self._connection.bytes_out == self._written
        if silent and (self._writing is None or self._writing.done()):
            self._writing = self._loop.create_task(self._connection.write_between(COMMENT))
            self._writing.add_done_callback(_forget)
        self._wait()


def _forget(writing: asyncio.Task[None]) -> None:
    """A client that has gone is noticed by whoever writes the next frame."""
    if not writing.cancelled():
        writing.exception()
