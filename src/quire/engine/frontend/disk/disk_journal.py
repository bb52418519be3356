"""`DiskJournal`: what must be known to go on with streams after this process, written as it comes.

The server says which requests belong to a stream that is kept; of these the journal writes prompts,
seed and outputs, and of others nothing. An output may be lost without harm: from the beginning of
a stream everything after it is computed again, with the same bytes. So a step costs the event loop
an entry in a queue, and a thread does the rest.

A listener of the front end. Knows no HTTP: what the server needs to render a reply is bytes to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import msgspec

from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.frontend.disk.cipher import read_key
from quire.engine.frontend.disk.folder import JournalFolder
from quire.engine.frontend.disk.records import Kind, Record
from quire.engine.frontend.disk.stored import (
    Opened,
    Step,
    StoredFile,
    StoredOutput,
    StoredPrompt,
    params_digest,
    read_file,
)
from quire.engine.frontend.disk.writer import JournalWriter, WriterState
from quire.engine.frontend.listeners import AcceptedRequest, Listener
from quire.errors import StartupError

WRITTEN_SECONDS: Final = 1.0
"""Seconds that a stream waits for its beginning to be written."""
CLOSE_SECONDS: Final = 2.0
"""Seconds that the last write may take."""

_encode: Final = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """How the journal is kept."""

    folder: str
    fsync: str = "interval"
    """`never`, `interval` or `always`."""
    max_bytes: int = 2**30
    key_file: str | None = None


@dataclass(slots=True)
class _Stream:
    number: int
    opening: bytes
    is_open: bool = False


class DiskJournal(Listener):
    """The journal of one process, and what others have left in its folder.

    Args:
        options: How it is kept.
        waits: Whether another process may still own the folder.

    Raises:
        StartupError: the folder cannot be used.
        ConfigError: the key file cannot.
    """

    def __init__(self, options: JournalOptions, waits: bool = False) -> None:
        self._options = options
        self._key = None if options.key_file is None else read_key(options.key_file)
        self._folder = JournalFolder(options.folder, waits)
        self._writer: JournalWriter | None = None
        self.identity: dict[str, str] = {}
        """Of this process; see `identity.py`."""
        self._numbers = count(1)
        self._streams: dict[str, _Stream] = {}
        self._expected: dict[str, tuple[str, int]] = {}
        # by external request id: stream, and index of the prompt
        self._places: dict[str, tuple[int, int, int]] = {}
        # by internal id of a completion that runs: stream's number, prompt, index
        self._has_released = False

    # ---- what others have left -----------------------------------------------------------------

    def adopt(self) -> list[StoredFile]:
        """What processes that have ended left, if the folder is ours by now.

        Raises:
            StartupError: a file cannot be used; the message says what to do.
        """
        if not self._folder.acquire():
            return []
        return [read_file(path, self._key) for path in self._folder.left_behind()]

    def peek(self) -> list[StoredFile]:
        """What other processes have written so far and nobody has taken over. To be called on any
        thread."""
        own = None if self._writer is None else self._writer.path
        found = []
        for path in self._folder.others(own):
            # One that cannot be read is told of when its process has ended.
            with contextlib.suppress(StartupError):
                found.append(read_file(path, self._key, tell_damage=False))
        return found

    @property
    def is_owner(self) -> bool:
        """Whether the folder is ours, and not still that of the process before this one."""
        return self._folder.is_owner

    def discard(self, file: StoredFile) -> None:
        """A file has been taken over, or is of no use."""
        file.path.unlink(missing_ok=True)

    # ---- what the server says ------------------------------------------------------------------

    def begin(self, identity: Mapping[str, str]) -> None:
        """Write from now on, in the name of this model and program."""
        self.identity = dict(identity)
        first = Record(Kind.IDENTITY, 0, 0, _encode(dict(identity)))
        options = self._options
        self._writer = JournalWriter(
            self._folder, self._key, options.fsync, options.max_bytes, first
        )

    def expect(self, stream_id: str, opening: bytes, request_ids: Iterable[str]) -> None:
        """Requests of a stream that is kept are about to be submitted, one for each prompt."""
        if self._writer is None:
            return
        if stream_id not in self._streams:
            self._streams[stream_id] = _Stream(next(self._numbers), opening)
        for index, request_id in enumerate(request_ids):
            self._expected[request_id] = stream_id, index

    async def written(self) -> None:
        """Return when all that was heard is in the file (and on the disk, if it is always synced),
        or cannot be."""
        if self._writer is None:
            return
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(done.set)

        self._writer.when_written(tell)
        # A disk that hangs costs durability, as one that fails does, and not service.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITTEN_SECONDS):
                await done.wait()

    def end(self, stream_id: str) -> None:
        """The reply of a stream is complete."""
        if (stream := self._streams.get(stream_id)) and stream.is_open:
            self._put(Record(Kind.END, stream.number, 0, _encode(time.time())))

    def forget(self, stream_id: str) -> None:
        """A stream is not kept any longer."""
        if (stream := self._streams.pop(stream_id, None)) and stream.is_open:
            self._put(Record(Kind.FORGET, stream.number, 0, b""))

    def release(self, stream_id: str) -> None:
        """Leave a stream to the process that comes next: nothing more of it is written."""
        stream = self._streams.pop(stream_id)
        self._has_released = True
        self._places = {i: place for i, place in self._places.items() if place[0] != stream.number}
        self._put(Record(Kind.RELEASE, stream.number, 0, b""))

    def close(self) -> None:
        """Write what is left, and leave the folder. What happens from now on is not written: what
        is unfinished stays so. A file without streams is removed."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(CLOSE_SECONDS, forget=not (self._streams or self._has_released))
        self._folder.close()

    def holds(self, stream_id: str) -> bool:
        """Whether another process could go on with the stream."""
        stream = self._streams.get(stream_id)
        return stream is not None and stream.is_open and self.state.works

    @property
    def state(self) -> WriterState:
        """Of the file, for metrics."""
        return WriterState() if self._writer is None else self._writer.state

    # ---- what the front end says -----------------------------------------------------------------

    def accepted(self, accepted: AcceptedRequest) -> None:
        """Write a request of a kept stream."""
        found = self._expected.pop(accepted.request_id, None)
        if found is None or self._writer is None:
            return
        (stream_id, index), processed = found, accepted.processed
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        for request in processed.requests:
            self._places[request.request_id] = stream.number, index, request.index
        ids, is_first = processed.requests[0].prompt_token_ids, not stream.is_open
        stream.is_open = True

        def work() -> list[Record]:
            prompt = StoredPrompt(index, ids, processed.seed, params_digest(processed.params))
            if is_first:
                payload = _encode(Opened(stream_id, stream.opening, prompt))
                return [Record(Kind.OPEN, stream.number, 0, payload)]
            return [Record(Kind.PROMPT, stream.number, 0, _encode(prompt))]

        self._writer.put(work)

    def stepped(self, outputs: Sequence[EngineCoreOutput], stats: StepStats | None) -> None:
        """Write the outputs of kept streams."""
        places = self._places
        if not places or self._writer is None:
            return
        mine = [(place, o) for o in outputs if (place := places.get(o.request_id)) is not None]
        if not mine:
            return
        for _, output in mine:
            if output.finish_reason is not None:
                del places[output.request_id]
        self._writer.put(lambda: _step_records(mine))

    def closed(self, internal_ids: Sequence[str]) -> None:
        """Completions ended on this side; their streams say what becomes of them."""
        for internal_id in internal_ids:
            self._places.pop(internal_id, None)

    def _put(self, record: Record) -> None:
        if self._writer is not None:
            self._writer.put(lambda: [record])


def _step_records(
    mine: Sequence[tuple[tuple[int, int, int], EngineCoreOutput]],
) -> list[Record]:
    """The outputs of one step, a record for each stream."""
    steps: dict[int, Step] = {}
    for (number, prompt, index), output in mine:
        steps.setdefault(number, []).append(StoredOutput.of(prompt, index, output))
    return [Record(Kind.STEP, number, 0, _encode([step])) for number, step in steps.items()]
