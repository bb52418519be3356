"""The thread that writes a journal file: what came since the last time, in one write.

It keeps no more than positions. A disk that is full, read-only or broken costs durability: one
warning, a metric, and a new attempt every second; the beginnings of streams are kept until they can
be written, tokens are not, because they are computed again. Knows no requests and no event loop.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire.engine.frontend.disk.cipher import file_cipher
from quire.engine.frontend.disk.folder import JournalFolder, write_all
from quire.engine.frontend.disk.records import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    Damage,
    Header,
    Kind,
    Record,
    encode,
    scan,
)
from quire.logger import get_logger

logger = get_logger(__name__)

GATHER_SECONDS: Final = 0.05
"""Seconds for which what comes is gathered, unless somebody waits for it to be written."""
SYNC_SECONDS: Final = 1.0
"""Time between two calls of fsync with `--journal-fsync interval`."""
RETRY_SECONDS: Final = 1.0
COMPACT_BYTES: Final = 2**22
"""Of records that nobody needs any more, before the file is written anew without them."""

Work = Callable[[], list[Record]]
"""Makes records on the writer's thread; their places are filled in when they are written."""


@dataclass(slots=True)
class WriterState:
    """What is known of the file, for metrics."""

    works: bool = True
    """Whether the last write succeeded."""
    num_bytes: int = 0
    num_failures: int = 0
    num_lost: int = 0
    """Records that could not be written."""


@dataclass(frozen=True, slots=True)
class _Then:
    then: Callable[[], None]


class JournalWriter:
    """Writes one file.

    Args:
        folder: Where it is.
        key: To encrypt it with.
        fsync: `never`, `interval` or `always`.
        most_bytes: Size of the file at most; beyond it, it counts as full.
        first: Its first record.
    """

    def __init__(
        self, folder: JournalFolder, key: bytes | None, fsync: str, most_bytes: int, first: Record
    ) -> None:
        self.state = WriterState()
        self._folder = folder
        self._fsync = fsync
        self._most_bytes = most_bytes
        self._first = first
        self._header = Header.new(key is not None)
        self._cipher = None if key is None else file_cipher(key, self._header)
        self._path: Path | None = None
        self._fd = -1
        self._places: dict[int, int] = {}
        # the next place in each stream that is in the file or waits to be
        self._sizes: dict[int, int] = {}
        # bytes that these streams take in the file
        self._broken: set[int] = set()
        # streams of which a record was lost: what comes later would not follow
        self._dead = 0
        # bytes of streams that were forgotten
        self._begins: dict[int, Record] = {}
        # records that begin a stream and could not be written yet
        self._retry_at = self._sync_at = 0.0
        self._unsynced = False
        self._work: deque[Work | _Then] = deque()
        self._wake = threading.Event()
        self._urgent = threading.Event()
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="quire-journal", daemon=True)
        self._thread.start()

    # ---- on any thread -----------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """Of the file, once it has been made."""
        return self._path

    def put(self, work: Work) -> None:
        """Write what `work` makes, soon."""
        self._work.append(work)
        if not self._wake.is_set():
            self._wake.set()

    def when_written(self, then: Callable[[], None]) -> None:
        """Call `then` on the writer's thread when all that was put before has been written (and
        synced, with `--journal-fsync always`), or cannot be."""
        self._work.append(_Then(then))
        self._urgent.set()
        self._wake.set()

    def close(self, seconds: float, forget: bool = False) -> None:
        """Write what is left, and end.

        Args:
            seconds: That it may take.
            forget: Nothing in the file is needed: remove it.
        """
        self._ends = True
        self._urgent.set()
        self._wake.set()
        self._thread.join(seconds)
        if self._fd >= 0 and not self._thread.is_alive():
            if forget and self._path is not None:
                with contextlib.suppress(OSError):
                    os.unlink(self._path)
            os.close(self._fd)
            self._fd = -1

    # ---- on its thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._ends and not self._work):
            self._wait()
            try:
                self._write([self._work.popleft() for _ in range(len(self._work))])
            except Exception:
                logger.exception("the journal failed; what it was about to write is lost")
                self.state.num_failures += 1
        self._sync(always=self._fsync != "never")

    def _wait(self) -> None:
        timeout = None
        if self._unsynced and self._fsync == "interval":
            timeout = max(0.0, self._sync_at - time.monotonic())
        if self._begins:
            timeout = min(timeout or RETRY_SECONDS, RETRY_SECONDS)
        if self._wake.wait(timeout) and not self._ends:
            self._urgent.wait(GATHER_SECONDS)
        self._wake.clear()
        self._urgent.clear()

    def _write(self, work: list[Work | _Then]) -> None:
        records: list[Record] = []
        waiting: list[Callable[[], None]] = []
        for one in work:
            if isinstance(one, _Then):
                waiting.append(one.then)
            else:
                records += one()
        try:
            if records or self._begins:
                self._append(records)
            self._sync(always=self._fsync == "always")
        finally:
            for then in waiting:
                then()

    def _append(self, records: list[Record]) -> None:
        now = time.monotonic()
        if not self.state.works and now < self._retry_at:
            return self._lose(records)
        late = list(self._begins.values())
        placed = self._place(records)
        try:
            self._write_out([*late, *placed])
        except OSError as error:
            self._lose(placed)
            self.state.num_failures += 1
            self._retry_at = now + RETRY_SECONDS
            if self.state.works:
                self.state.works = False
                logger.warning(
                    "the journal cannot be written (%s): service goes on, but requests that are "
                    "accepted now end if this process does",
                    error.strerror or error,
                )
        else:
            self._begins.clear()
            if not self.state.works:
                self.state.works = True
                logger.info("the journal can be written again")

    def _place(self, records: list[Record]) -> list[Record]:
        placed = []
        for one in records:
            place = self._places.get(one.stream)
            if one.kind is Kind.OPEN:
                place = 0
            elif place is None:
                continue  # of a stream that is not in the file
            elif len(one.payload) > MAX_PAYLOAD:
                self._broken.add(one.stream)
            if one.kind is not Kind.FORGET and one.stream in self._broken:
                continue
            self._places[one.stream] = place + 1
            placed.append(Record(one.kind, one.stream, place, one.payload))
        return placed

    def _lose(self, records: list[Record]) -> None:
        """What could not be written. The beginnings of streams are tried again; a stream whose
        beginning is in the file goes on from what is there of it."""
        for one in records:
            if one.kind is Kind.OPEN:
                self._places[one.stream] = 1
                self._begins[one.stream] = Record(one.kind, one.stream, 0, one.payload)
            elif one.kind is Kind.FORGET:
                self._begins.pop(one.stream, None)
            else:
                self.state.num_lost += 1
                self._broken.add(one.stream)

    def _write_out(self, records: list[Record]) -> None:
        if self._fd < 0:
            self._create()
        encoded = [encode(one, self._header, self._cipher) for one in records]
        data = b"".join(encoded)
        try:
            if self.state.num_bytes + len(data) > self._most_bytes:
                self._compact_if_full()
            if self.state.num_bytes + len(data) > self._most_bytes:
                raise OSError(None, f"over --journal-max-bytes {self._most_bytes}")
            write_all(self._fd, data)
        except OSError:
            # Half a record would only have to be skipped by readers, but it takes room.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.state.num_bytes)
                os.lseek(self._fd, self.state.num_bytes, os.SEEK_SET)
            raise
        self.state.num_bytes += len(data)
        self._note_unsynced()
        for one, part in zip(records, encoded, strict=True):
            self._sizes[one.stream] = self._sizes.get(one.stream, 0) + len(part)
            if one.kind is Kind.FORGET:
                self._places.pop(one.stream, None)
                self._broken.discard(one.stream)
                self._dead += self._sizes.pop(one.stream)
        if self._dead > COMPACT_BYTES and 2 * self._dead > self.state.num_bytes:
            self._compact()

    def _note_unsynced(self) -> None:
        if not self._unsynced:
            self._unsynced = True
            self._sync_at = time.monotonic() + SYNC_SECONDS

    def _sync(self, always: bool) -> None:
        due = always or (self._fsync == "interval" and time.monotonic() >= self._sync_at)
        if self._unsynced and due and self._fd >= 0:
            self._unsynced = False
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self.state.num_failures += 1
                logger.warning("the journal cannot be synced: %s", error.strerror)

    def _create(self) -> None:
        begin = self._header.encode() + encode(self._first, self._header, self._cipher)
        path, fd = self._folder.create()
        try:
            write_all(fd, begin)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        self._path, self._fd, self.state.num_bytes = path, fd, len(begin)

    def _compact_if_full(self) -> None:
        if self._dead:
            with contextlib.suppress(OSError):
                self._compact()

    def _compact(self) -> None:
        """Write the file anew without what was forgotten. Records stay as they are, bit by bit, so
        no nonce is used for anything else."""
        assert self._path is not None
        data = os.pread(self._fd, self.state.num_bytes, 0)
        parts = [data[:HEADER_BYTES]]
        for record in scan(data, self._header, Damage(), self._cipher):
            if record.stream in self._sizes or record.kind is Kind.IDENTITY:
                parts.append(data[record.start : record.end])
        kept = b"".join(parts)
        fd = self._folder.replace(self._path, kept)
        os.close(self._fd)
        self._fd, self.state.num_bytes, self._dead = fd, len(kept), 0
