"""Writes a trace while an engine works: requests as they end, and the decisions of every step.

Whoever calls it hands over what it has and goes on; a thread does the rest. If the thread falls
behind by too much, what comes then is left out and counted. Knows no engine.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Final

from quire.errors import ConfigError
from quire.logger import get_logger
from quire.workload.shared_prefixes import SharedPrefixes
from quire.workload.trace import TraceHeader, TraceRequest, TraceStep, encode_line

logger = get_logger(__name__)

MOST_PENDING: Final = 20_000
"""Events that may wait for the thread; there are one or two for each step."""
UNFINISHED: Final = "unfinished"
"""`TraceRequest.finish` of requests that had not ended when the recording did."""
ABORT: Final = "abort"
OF_EPOCH: Final = 2**32
"""Requests of later engine cores are numbered from multiples of this."""


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended."""

    arrival: float
    """Seconds on the engine's clock."""
    prompt_token_ids: Sequence[int]
    priority: int = 0
    key: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    sharing_key: str = ""
    """Requests with different ones share no prefix."""
    text: str | None = None
    output: list[int] = field(default_factory=list)
    number: int = 0


Ended = tuple[str, str]
"""(internal id, why it ended)."""


class TraceRecorder:
    """Writes one file.

    Args:
        path: Of the file; an old one is replaced.
        header: Its first line.
        origin: Time 0 of the trace, in seconds on the engine's clock.
        ended_in: Reads from the records of a step the numbers of the requests that ended.
        with_text: Write token ids and text, too.
        salt: For hashes; chosen anew for each recording unless it is given.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        header: TraceHeader,
        origin: float,
        ended_in: Callable[[bytes], Iterable[int]],
        *,
        with_text: bool = False,
        salt: bytes | None = None,
    ) -> None:
        self.path, self._origin, self._with_text = Path(path), origin, with_text
        self._salt = salt or secrets.token_bytes(32)
        self._prefixes = SharedPrefixes(self._salt, header.block_size)
        self._ended_in = ended_in
        self._open: dict[str, OpenRequest] = {}
        self._closed: set[str] = set()
        # those of them that were given up
        self._epochs = 0
        self._unnamed = 0
        self.num_lost = 0
        """Events that were left out."""
        self._events: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_PENDING)
        try:
            self._file: IO[bytes] = open(self.path, "wb")  # noqa: SIM115
            self._file.write(encode_line(header))
        except OSError as error:
            raise ConfigError(f"--record: cannot write {str(path)!r}: {error.strerror}") from None
        self._thread = threading.Thread(target=self._run, name="quire-record", daemon=True)
        self._thread.start()

    # ---- what the engine tells; microseconds -------------------------------------------------

    def accept(self, internal_id: str, request: OpenRequest) -> None:
        """A completion was accepted."""
        self._put(lambda: self._open.__setitem__(internal_id, request))

    def step(
        self,
        tokens: Sequence[tuple[str, Sequence[int]]],
        ended: Sequence[Ended],
        step: TraceStep | None,
        names: Sequence[tuple[int, str]],
    ) -> None:
        """A step was taken.

        Args:
            tokens: (internal id, new tokens) of each request with output.
            ended: The requests that ended with it.
            step: Its record; times are on the engine's clock.
            names: Numbers of requests that are first named in it.
        """
        self._put(lambda: self._step(tokens, ended, step, names))

    def close_requests(self, internal_ids: Sequence[str]) -> None:
        """Requests were given up by who asked."""
        self._put(lambda: self._close_requests(internal_ids))

    def begin_core(self) -> None:
        """What follows comes from another engine core, which numbers steps and requests afresh."""
        self._put(self._begin_core)

    def close(self) -> None:
        """Write what is there and end; waits at most four seconds. Safe to call twice."""
        if self._thread.is_alive():
            # There need be no room: nobody hears of the end of a queue that is full.
            with suppress(queue.Full):
                self._events.put(self._finish, timeout=1.0)
                self._events.put(None, timeout=1.0)
                self._thread.join(2.0)
            if self.num_lost:
                logger.warning(
                    "%s: %d events are missing in the recording, because writing fell behind",
                    self.path,
                    self.num_lost,
                )

    def _put(self, event: Callable[[], None] | None) -> None:
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self.num_lost += 1

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                event()
                if self._events.empty():
                    self._file.flush()
        except Exception:
            logger.exception("%s: the recording ends here", self.path)
        finally:
            self._file.close()

    def _begin_core(self) -> None:
        self._epochs += 1
        self._end([(name, ABORT) for name in self._closed])
        for request in self._open.values():
            request.number = 0  # the new core gives them others

    def _close_requests(self, internal_ids: Sequence[str]) -> None:
        for name in internal_ids:
            # It waits for the core's word, which is what steps were decided by: it may have got
            # tokens, or all of them, meanwhile.
            if name in self._open:
                self._closed.add(name)

    def _step(
        self,
        tokens: Sequence[tuple[str, Sequence[int]]],
        ended: Sequence[Ended],
        step: TraceStep | None,
        names: Sequence[tuple[int, str]],
    ) -> None:
        for number, name in names:
            if (request := self._open.get(name)) is not None:
                request.number = number + max(0, self._epochs - 1) * OF_EPOCH
        for name, new in tokens:
            if (request := self._open.get(name)) is not None:
                request.output += new
                if len(new) > 1 and step is not None:
                    step.several = [*step.several, (request.number, len(new))]
        self._end(ended)
        if self._closed and step is not None:
            gone = set(self._ended_in(step.facts))
            numbers = {name: self._open[name].number % OF_EPOCH for name in self._closed}
            self._end([(name, ABORT) for name, number in numbers.items() if number in gone])
        # Decisions of a core that took over begin in the middle: nobody could run them again.
        if step is not None and self._epochs <= 1:
            step.start -= self._origin
            self._file.write(encode_line(step))

    def _end(self, ended: Sequence[Ended]) -> None:
        for name, why in ended:
            if (request := self._open.pop(name, None)) is not None:
                self._closed.discard(name)
                self._file.write(encode_line(self._line(request, why)))

    def _finish(self) -> None:
        self._end([(name, ABORT) for name in self._closed])
        self._end([(name, UNFINISHED) for name in self._open])

    def _line(self, request: OpenRequest, why: str) -> TraceRequest:
        if not request.number:
            self._unnamed += 1
            request.number = 2**40 + self._unnamed
        tokens = [*request.prompt_token_ids, *request.output]
        sharing = self._prefixes.add(request.number, tokens, request.sharing_key)
        return TraceRequest(
            max(0.0, request.arrival - self._origin),
            len(request.prompt_token_ids),
            len(request.output),
            priority=request.priority,
            key=self._pseudonym(request.key),
            cache_salt=self._pseudonym(request.sharing_key),
            number=request.number,
            block_hashes=sharing.block_hashes,
            shared_with=sharing.number,
            shared_len=sharing.length,
            params=request.params,
            finish=why,
            token_ids=tokens if self._with_text else None,
            text=request.text if self._with_text else None,
        )

    def _pseudonym(self, name: str) -> str:
        if not name:
            return ""
        raw = name.encode("utf-8", "surrogatepass")
        return blake2b(raw, key=self._salt, digest_size=8).hexdigest()
