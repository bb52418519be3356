"""Replies that are kept for clients that lost their connection, and the bounds on all of them.

A kept reply is written by the task that answers the request, whether anybody reads it or not, into
a log of bytes; each reader has a place in that log. Several may read at once. Ended replies are
kept for a time and within a count and a number of bytes; the oldest go first. Knows no HTTP: a
reply is a status, headers, and bytes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol

from quire.errors import NotFound, QuireError, TooManyRequests
from quire.logger import get_logger
from quire.observability.metrics.http_metrics import HttpMetrics, KeptNow
from quire.serving.dialect import Dialect
from quire.serving.errors import (
    KeptBytesExceeded,
    ReaderReplaced,
    StreamDeleted,
    StreamHandedOver,
    StreamsReturning,
)
from quire.serving.stream_positions import EventIds

logger = get_logger(__name__)

MAX_READERS: Final = 4
"""Readers of one reply at a time. Connections that broke unnoticed are among them, so the newest
must be let in: the oldest goes."""
PIECE: Final = 64 * 1024
"""Most bytes that a reader takes at once, unless one event is longer."""
Headers = list[tuple[bytes, bytes]]


class KeptJournal(Protocol):
    """Who is told what becomes of replies, by the id of their stream."""

    def end(self, stream_id: str) -> None:
        """One is complete."""
        ...

    def forget(self, stream_id: str) -> None:
        """One is not kept any longer."""
        ...

    def holds(self, stream_id: str) -> bool:
        """Whether another process could go on with it."""
        ...

    def release(self, stream_id: str) -> None:
        """Another process is to go on with it."""
        ...


class Pending(Protocol):
    """Replies that a process before this one still has."""

    async def look(self) -> None:
        """Find out which these are."""
        ...

    def has(self, stream_id: str) -> bool:
        """Whether this reply may still come."""
        ...

    def has_key(self, owner: bytes, key: str) -> bool:
        """Whether a reply may still come that its client named with this `Idempotency-Key`."""
        ...


@dataclass(frozen=True, slots=True)
class Opening:
    """What a kept reply is the reply to."""

    owner: bytes
    """Whose it is: a digest of the API key, empty if the server has none."""
    digest: bytes
    """Of path and body; the same request asked again has the same."""
    key: str | None
    """The client's `Idempotency-Key`."""
    asked: bool
    """Whether the client wants it kept, rather than the server's configuration."""
    dialect: Dialect
    """How its stream tells errors."""


class KeptReply:
    """A reply that is being written, or is complete.

    Args:
        stream_id: See the attribute.
        opening: See the attribute.
        store: Where it is kept.
    """

    def __init__(self, stream_id: str, opening: Opening, store: KeptReplies) -> None:
        self.id: Final = stream_id
        """Not to be guessed: on a server without keys, whoever knows it may read."""
        self.opening: Final = opening
        self.ids: Final = EventIds(stream_id)
        """Names the events of a stream."""
        self.status: int | None = None
        """`None` until the reply has begun."""
        self.headers: Headers = []
        self.ended = False
        self.failure: BaseException | None = None
        """What kept the reply from beginning."""
        self.stopped: QuireError | None = None
        """Why it was ended from outside, if it was."""
        self.task: asyncio.Task[None] | None = None
        """The task that writes."""
        self.is_restored = False
        """It was begun by another process."""
        self.was_read = False
        """Whether anybody has asked for it."""
        self.timer: asyncio.TimerHandle | None = None
        """The end of its time, once it has ended."""
        self._store = store
        self._log = bytearray()
        self._dropped = 0
        # bytes from the beginning that are not kept any more
        self._readers: list[Reader] = []

    # ---- writing -----------------------------------------------------------------------------

    def answer(self, work: Coroutine[Any, Any, None]) -> None:
        """Start the task that writes the reply."""
        self.task = asyncio.ensure_future(self._answer(work))

    async def _answer(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BaseException as error:
            if not self.ended:
                self.fail(self.stopped or error)
            if not isinstance(error, Exception) and self.stopped is None:
                raise

    def start(self, status: int, headers: Headers) -> None:
        """The reply begins."""
        self.status, self.headers = status, headers
        self._wake()

    def write(self, data: bytes) -> None:
        """Bytes of the body."""
        self._log += data
        self._store.grew(self, len(data))
        self._wake()

    def end(self, data: bytes, failed: bool = False) -> None:
        """The last bytes. If the reply is that of a failure, the same request may be tried anew."""
        self.ended = True
        self.write(data)
        self._store.ended(self, failed)

    def fail(self, error: BaseException) -> None:
        """The reply will not begin, or not end."""
        self.ended, self.failure = True, error
        if self.is_restored:
            self._store.ended(self, failed=True)  # its client has yet to hear of it
        else:
            self._store.forget(self)
        self._wake()

    def stop(self, why: QuireError) -> None:
        """End it: nobody wants it any more, or it is too large."""
        if not self.ended and self.task is not None and self.stopped is None:
            self.stopped = why
            self.task.cancel()

    def _wake(self) -> None:
        for reader in self._readers:
            reader.news.set()

    # ---- reading -----------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return len(self._log)

    @property
    def content_type(self) -> bytes:
        """Of the body, once the reply has begun."""
        return next((value for name, value in self.headers if name == b"content-type"), b"")

    @property
    def end_of_log(self) -> int:
        """Bytes that were written."""
        return self._dropped + len(self._log)

    def has(self, event_id: str) -> bool:
        """Whether the log has this event by now."""
        return self._log.find(_line(event_id)) >= 0

    def after(self, event_id: str) -> int:
        """Where the log goes on after an event.

        Raises:
            NotFound: no such event is kept.
        """
        if self.failure is not None:
            raise self.failure
        line = _line(event_id)
        at = self._log.find(line)
        if at < 0:
            raise NotFound(
                "The stream has no event with this id, or does not keep it any more.",
                param="Last-Event-ID",
            )
        return self._dropped + at + len(line)

    def read(self, start: int = 0) -> Reader:
        """A reader from a place on. One that is too many replaces the oldest.

        Raises:
            NotFound: what stands there is not kept any more.
        """
        if start < self._dropped:
            raise NotFound("The stream's beginning is not kept any more.")
        while len(self._readers) >= MAX_READERS:
            replaced = self._readers.pop(0)
            replaced.replaced = True
            replaced.news.set()
        self.was_read = True
        reader = Reader(self, start)
        self._readers.append(reader)
        return reader

    def leave(self, reader: Reader) -> None:
        """A reader has gone."""
        if reader in self._readers:
            self._readers.remove(reader)
        if not self._readers:
            self._store.unread(self)

    def dismiss(self) -> None:
        """Send all readers away, who may hold more memory than there is."""
        self._dropped, self._log = self.end_of_log, bytearray()
        self._wake()

    @property
    def has_readers(self) -> bool:
        """Whether anybody reads it now."""
        return bool(self._readers)

    def piece(self, start: int) -> bytes:
        """What stands from there on, as much as is read at once.

        Raises:
            NotFound: it is not kept any more.
        """
        if start < self._dropped:
            raise NotFound("The stream's beginning is not kept any more.")
        start -= self._dropped
        end = start + PIECE
        if end < len(self._log):  # only between events, where others may write comments
            end = self._log.rfind(b"\n\n", start, end) + 2
            end = end if end > 1 else self._log.find(b"\n\n", start) + 2
            end = end if end > 1 else start + PIECE  # it is no stream of events
        with memoryview(self._log) as log:  # a copy of a large event less
            return bytes(log[start:end])

    def trim(self) -> int:
        """Drop what every reader has taken, but at most half, because its connection may break;
        returns how many bytes that were. Without readers nothing is dropped: then somebody will
        come for it."""
        places = [reader.place for reader in self._readers]
        spare = min(places) - self._dropped if places else 0
        spare = min(spare, (self.size + 1) // 2)
        if spare:
            del self._log[:spare]
            self._dropped += spare
        return spare


def _line(event_id: str) -> bytes:
    return b"\nid: %b\n\n" % event_id.encode("ascii", "replace")


class Reader:
    """One connection's place in a reply."""

    def __init__(self, kept: KeptReply, place: int) -> None:
        self.kept = kept
        self.place = place
        """Bytes that it has taken, or never wanted."""
        self.news = asyncio.Event()
        self.replaced = False

    async def begun(self) -> None:
        """Return when the reply has begun.

        Raises:
            BaseException: why it will not.
        """
        while self.kept.status is None:
            if self.kept.failure is not None:
                raise self.kept.failure
            await self._wait()

    async def take(self) -> tuple[bytes, bool]:
        """The next bytes, and whether more will follow.

        Raises:
            ReaderReplaced: newer readers have come.
            NotFound: it reads too slowly, and they are not kept any more.
        """
        kept = self.kept
        while True:
            if self.replaced:
                raise ReaderReplaced(MAX_READERS)
            data = kept.piece(self.place)
            self.place += len(data)
            more = not kept.ended or self.place < kept.end_of_log
            if data or not more:
                return data, more
            await self._wait()

    async def _wait(self) -> None:
        self.news.clear()
        await self.news.wait()


class KeptReplies:
    """All kept replies of a server.

    Args:
        seconds: How long one is kept after its end.
        most: How many are kept, running ones among them.
        most_bytes: Of all together.
        metrics: Counts what becomes of them.
    """

    def __init__(self, seconds: float, most: int, most_bytes: int, metrics: HttpMetrics) -> None:
        self._seconds = seconds
        self._most = most
        self._most_bytes = most_bytes
        self._metrics = metrics
        self._num_bytes = 0
        self._all: dict[str, KeptReply] = {}
        # those that can be found
        self._counted: dict[KeptReply, None] = {}
        # those that take memory: also the forgotten ones that somebody still reads
        self._ended: dict[str, KeptReply] = {}
        # those that have ended, by the time of their end
        self._keys: dict[tuple[bytes, str], KeptReply] = {}
        self.journal: KeptJournal | None = None
        """Hears what becomes of the replies."""
        self.pending: Pending | None = None
        """Replies that may still come from a process before this one."""
        self._gives_away = False
        metrics.kept_now = self.now

    def now(self) -> KeptNow:
        """What is kept."""
        ended = len(self._ended)
        return KeptNow(len(self._all) - ended, ended, self._num_bytes)

    def open(self, opening: Opening) -> KeptReply | None:
        """Keep another reply; `None` if there is no room and nobody asked for it.

        Raises:
            TooManyRequests: there is no room.
        """
        if len(self._all) >= self._most and not self._drop_oldest("count"):
            if not opening.asked:
                return None
            raise TooManyRequests(
                f"The server keeps at most {self._most} resumable replies (--max-kept-streams), "
                "and all of them are still being generated."
            )
        return self._add(KeptReply(secrets.token_urlsafe(16), opening, self))

    def restore(self, stream_id: str, opening: Opening) -> KeptReply:
        """A reply that another process kept, which is rendered again. It counts, but is not refused
        for the number of others."""
        kept = KeptReply(stream_id, opening, self)
        kept.is_restored = True
        return self._add(kept)

    def _add(self, kept: KeptReply) -> KeptReply:
        opening = kept.opening
        self._all[kept.id] = kept
        self._counted[kept] = None
        if opening.key is not None:
            self._keys[opening.owner, opening.key] = kept
        return kept

    def find(self, stream_id: str, owner: bytes) -> KeptReply:
        """A kept reply by its id.

        Raises:
            NotFound: there is none of this owner.
            ServiceUnavailable: it may still come.
        """
        kept = self._all.get(stream_id)
        if kept is None and self.pending is not None and self.pending.has(stream_id):
            raise StreamsReturning
        if kept is None or kept.opening.owner != owner:
            raise NotFound(
                "There is no such stream: it was never kept, its time is over, or it is not yours."
            )
        return kept

    def by_key(self, owner: bytes, key: str) -> KeptReply | None:
        """The reply that a client named with its `Idempotency-Key`.

        Raises:
            ServiceUnavailable: it may still come.
        """
        kept = self._keys.get((owner, key))
        if kept is None and self.pending is not None and self.pending.has_key(owner, key):
            raise StreamsReturning
        return kept

    async def look_for(self, stream_id: str | None = None) -> None:
        """Find out what else may still come, unless this reply is here; to be awaited before `find`
        and `by_key`."""
        if self.pending is not None and stream_id not in self._all:
            await self.pending.look()

    def give_away(self) -> None:
        """Another process is there for new connections, and reads this one's journal. A client who
        is not connected here will come to that one: it is to go on with the reply."""
        self._gives_away = True
        for kept in list(self._all.values()):
            if not kept.has_readers:
                self._give(kept)

    def _give(self, kept: KeptReply) -> None:
        if self.journal is None or not self.journal.holds(kept.id):
            return
        self.journal.release(kept.id)
        kept.stop(StreamHandedOver())
        self.forget(kept)

    def running(self) -> list[KeptReply]:
        """Those that have not ended."""
        return [kept for kept in self._all.values() if not kept.ended]

    def delete(self, kept: KeptReply) -> None:
        """Stop and forget one."""
        kept.stop(StreamDeleted())
        self.forget(kept)

    def forget(self, kept: KeptReply) -> None:
        """Keep it no longer. Who is reading it reads on."""
        if self._all.pop(kept.id, None) is None:
            return
        self._ended.pop(kept.id, None)
        self._free_key(kept)
        if self.journal is not None:
            self.journal.forget(kept.id)
        if kept.timer is not None:
            kept.timer.cancel()
        if not kept.has_readers:
            self._uncount(kept)

    def unread(self, kept: KeptReply) -> None:
        """The last of its readers has gone."""
        if kept.id not in self._all:
            self._uncount(kept)
        elif self._gives_away:
            self._give(kept)

    def grew(self, kept: KeptReply, size: int) -> None:
        """A reply has so many bytes more. Over the limit, make room."""
        if kept not in self._counted:
            return
        self._num_bytes += size
        while self._num_bytes > self._most_bytes:
            self._make_smaller()

    def _uncount(self, kept: KeptReply) -> None:
        if kept in self._counted:
            del self._counted[kept]
            self._num_bytes -= kept.size

    def ended(self, kept: KeptReply, failed: bool) -> None:
        """A reply is complete: its time runs."""
        if kept.id not in self._all:
            return
        self._ended[kept.id] = kept
        if failed:
            self._free_key(kept)
        if self.journal is not None:
            # A failure would not come out the same way again.
            (self.journal.forget if failed else self.journal.end)(kept.id)
        loop = asyncio.get_running_loop()
        kept.timer = loop.call_later(self._seconds, self._drop, kept, "expired")

    def _free_key(self, kept: KeptReply) -> None:
        place = (kept.opening.owner, kept.opening.key or "")
        if self._keys.get(place) is kept:
            del self._keys[place]

    def _drop_oldest(self, reason: str) -> bool:
        oldest = next(iter(self._ended.values()), None)
        if oldest is not None:
            self._drop(oldest, reason)
        return oldest is not None

    def _drop(self, kept: KeptReply, reason: str) -> None:
        if kept.id in self._all:
            self._metrics.count_dropped_stream(reason)
            self.forget(kept)

    def _make_smaller(self) -> None:
        """The oldest that has ended goes. If there is none, the longest of the others loses what
        its readers have, or ends."""
        oldest = next(iter(self._ended.values()), None)
        longest = oldest or max(self._counted, key=lambda kept: kept.size)
        if oldest is None and (spare := longest.trim()):
            self._num_bytes -= spare
            return
        longest.stop(KeptBytesExceeded(longest.size, self._most_bytes))
        self._drop(longest, "bytes")
        self._uncount(longest)
        longest.dismiss()
