"""The events of a response that is made in the background, for readers that come and go.

An event's number is its place, so a reader names the last one that it has. Knows no reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from quire.serving.named_events import named_event


class EventLog:
    """Grows while the response is made."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._ended = False
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._frames)

    def emit(self, name: str, **fields: Any) -> None:
        """Append an event."""
        self._frames.append(named_event(name, {"sequence_number": len(self._frames), **fields}))
        self._wake()

    def end(self) -> None:
        """There is no more to come."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def joined(self) -> bytes:
        """All events so far."""
        return b"".join(self._frames)

    async def read(self, first: int) -> AsyncGenerator[bytes]:
        """The events from number `first` on, until the response has ended."""
        while True:
            news = self._news
            if first < len(self._frames):
                found = self._frames[first:]
                first += len(found)
                yield b"".join(found)
            elif self._ended:
                return
            else:
                await news.wait()


def frames_of(events: bytes) -> Iterator[bytes]:
    """The single events of `EventLog.joined`."""
    return (frame + b"\n\n" for frame in events.split(b"\n\n") if frame)
