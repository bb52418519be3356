"""The outputs of one request on their way from the engine to its caller.

A slow reader never holds up the engine or another caller: what it has not read is held for it. From
the 16th output on, further ones are merged into the last, so that a token costs some bytes and not
an object of its own. All callers of an engine share `--max-buffered-bytes`, and so do connections
that have not taken what was sent to them; if they leave more unread, the one that holds most is
ended, and the others go on. A caller that keeps up pays for none of this. Knows no engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeGuard

from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.output_processor import Delta
from quire.engine.frontend.prompt_logprobs import PromptLogprobs
from quire.errors import QuireError, SlowReader
from quire.logger import get_logger
from quire.outputs import CompletionOutput, RequestOutput
from quire.params import RequestOutputKind

logger = get_logger(__name__)

MERGE_BEYOND: Final = 16
"""Outputs that are held as they came."""
MOST_MERGED: Final = 256
"""Tokens of a merged output. A longer one would cost more to extend each time."""
OUTPUT_BYTES: Final = 1024
TOKEN_BYTES: Final = 40
LOGPROB_BYTES: Final = 256
"""Memory of an output, and of a token and one candidate of its log-probabilities in it."""


class Pipe(Protocol):
    """A connection that takes chunks of a body without detours."""

    is_paused: bool
    """Whether its client has yet to take what was written."""

    def send_chunk(self, data: bytes) -> None:
        """Write one chunk; nothing if the client has gone."""
        ...


class Outbox:
    """Chunks that the outputs of a step are, to be sent in one go once they are rendered: code that
    takes turns with the kernel's runs slower. Nothing else may be written before to a connection
    that has something here."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[tuple[Pipe, bytes]] = []
        """Chunks in their order, and where they go."""

    def send(self) -> None:
        """Send everything."""
        waiting, self.waiting = self.waiting, []
        for pipe, chunk in waiting:
            try:
                pipe.send_chunk(chunk)
            except Exception:
                logger.exception("a chunk could not be written to its connection")


class Holder(Protocol):
    """Something that holds bytes for a reader."""

    def end_slow(self, held: int, limit: int) -> None:
        """End it: it held most, and all together held more than the limit."""
        ...


class StreamBuffers:
    """The bytes that the readers of all streams of an engine have yet to take.

    The next output of each stream does not count: a reader that keeps up never has more.

    Args:
        limit: Most bytes, by estimate; `None`: no limit.
        count_ended: Called for each holder that is ended because of the limit.
    """

    def __init__(self, limit: int | None, count_ended: Callable[[], None]) -> None:
        self.limit = limit
        self.num_bytes = 0
        self._count_ended = count_ended
        self._behind: dict[Holder, int] = {}

    def grow(self, holder: Holder, size: int) -> None:
        """A holder has so many bytes more (or less, if negative). If the limit is passed, end those
        that hold most until it is not."""
        self._behind[holder] = self._behind.get(holder, 0) + size
        self.num_bytes += size
        while self.limit is not None and self.num_bytes > self.limit:
            slowest = max(self._behind, key=self._behind.__getitem__)
            held = self._behind[slowest]
            self.release(slowest)
            self._count_ended()
            slowest.end_slow(held, self.limit)

    def release(self, holder: Holder) -> None:
        """It holds nothing any more."""
        self.num_bytes -= self._behind.pop(holder, 0)


class RequestStream:
    """The outputs of one request, as an async iterator for one reader. Closing it early aborts the
    request.

    Args:
        request_id: The caller's.
        seed: See the attribute.
        checked: See the attribute.
        abort: Called with the id to end the request.
        buffers: Counts what is held.
        outbox: See the attribute.
    """

    def __init__(
        self,
        request_id: str,
        seed: int,
        checked: CheckedParams,
        abort: Callable[[str], None],
        buffers: StreamBuffers,
        outbox: Outbox | None = None,
    ) -> None:
        self.request_id = request_id
        self.seed = seed
        """Seed in force; repeating the request with it gives the same tokens."""
        self.checked = checked
        """Its parameters, to submit further prompts with."""
        self.outbox = Outbox() if outbox is None else outbox
        """For what `direct_text` sends; whoever calls `put_delta` empties it afterwards."""
        self._abort = abort
        self._buffers = buffers
        self._next: RequestOutput | QuireError | None = None
        self._held: deque[_Held] = deque()
        # what comes after the next one
        self._waiter: asyncio.Future[None] | None = None
        self._done = False
        self._ended_slow = False
        self._merges = True
        self._fault: Exception | None = None
        self.direct: Callable[[RequestOutput], bool] | None = None
        """Takes an output in the reader's place while the reader waits for it, so that the reader
        need not be woken for every token; false: the reader is to have it. It gets no output that
        ends the request or has something to say beside one completion's tokens."""
        self.direct_text: Callable[[str, int], bool] | None = None
        """The same for an output that is nothing but text and a number of tokens; false: it has
        not been taken, and nothing has changed."""

    def put(self, item: RequestOutput | QuireError) -> None:
        """Add an output, or the error that ends the stream. Called by the engine."""
        if self._next is None:
            waits = self._waiter is not None and not self._waiter.done()
            if waits and self.direct is not None and self._fault is None and _is_plain(item):
                try:
                    if self.direct(item):
                        return
                except Exception as error:  # it is the reader's
                    self._fault = error
            self._next = item
            if waits:
                assert self._waiter is not None
                self._waiter.set_result(None)
        elif not self._ended_slow and not self._done:
            self._hold(item)

    def put_delta(self, delta: Delta) -> None:
        """Add an output that is nothing but text."""
        waiter = self._waiter
        if self.direct_text is not None and waiter is not None and not waiter.done():
            try:
                if self.direct_text(delta.text, len(delta.token_ids)):
                    return
            except Exception as error:  # it is the reader's
                self._fault = error
        self.put(delta.full())

    def preload(self, items: Sequence[RequestOutput]) -> None:
        """Add outputs that were made before this stream was. Neither they nor what follows is
        merged: a reply that is rendered again has its events where they were. They are not counted:
        their reader is about to take them."""
        self._merges = False
        for item in items:
            if self._next is None:
                self._next = item
            else:
                self._held.append(_Held(item, 0))

    def _hold(self, item: RequestOutput | QuireError) -> None:
        if isinstance(item, QuireError):
            self._held.append(_Held(item, 0))
            return
        before = 0
        if len(self._held) >= MERGE_BEYOND and self._merges and self._held[-1].can_take(item):
            held = self._held[-1]
            before = held.size
            held.take(item, self.checked.params.output_kind)
        else:
            held = _Held(item, OUTPUT_BYTES + _size(item))
            self._held.append(held)
        self._buffers.grow(self, held.size - before)

    def end_slow(self, held: int, limit: int) -> None:
        """End the request because its reader is too slow: what it has not read is dropped, except
        for the next output."""
        self._ended_slow = True
        last = self._held[-1].item
        running = isinstance(last, RequestOutput) and not last.finished
        self._held.clear()
        self._held.append(
            _Held(
                SlowReader(
                    f"The reply was read too slowly: {held} bytes were waiting for this reader, "
                    f"and all readers together may leave {limit} (--max-buffered-bytes)."
                ),
                0,
            )
        )
        if running:
            self._abort(self.request_id)

    def unread(self) -> list[RequestOutput | QuireError]:
        """What its reader has yet to take, in order."""
        return ([] if self._next is None else [self._next]) + [held.item for held in self._held]

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._done:
            raise StopAsyncIteration
        while (item := self._next) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._fault is not None:
            raise self._fault
        self._next = self._take_held() if self._held else None
        if isinstance(item, QuireError):
            self._done = True
            raise item
        self._done = item.finished
        return item

    def _take_held(self) -> RequestOutput | QuireError:
        first = self._held.popleft()
        if not self._held:
            self._buffers.release(self)
        elif first.size:
            self._buffers.grow(self, -first.size)
        return first.item

    async def aclose(self) -> None:
        """End the request if it has not ended."""
        if not self._done:
            self._done = True
            self._held.clear()
            self._buffers.release(self)
            self._abort(self.request_id)


def _is_plain(item: RequestOutput | QuireError) -> TypeGuard[RequestOutput]:
    """Whether it is some tokens of one completion, and nothing else."""
    return (
        isinstance(item, RequestOutput)
        and not item.finished
        and len(item.outputs) == 1
        and item.error is None
    )


class _Held:
    """An output that waits for its reader, and its memory by estimate."""

    __slots__ = ("item", "size")

    def __init__(self, item: RequestOutput | QuireError, size: int) -> None:
        self.item = item
        self.size = size

    def can_take(self, later: RequestOutput) -> bool:
        """Whether a later output can be merged into this one. An error cannot: it would hide the
        text before it."""
        item = self.item
        if isinstance(item, QuireError) or item.error is not None or later.error is not None:
            return False
        return sum([len(c.token_ids) for c in item.outputs]) < MOST_MERGED

    def take(self, later: RequestOutput, kind: RequestOutputKind) -> None:
        """Merge a later output into this one; cumulative ones replace each other."""
        assert isinstance(self.item, RequestOutput)
        if kind is RequestOutputKind.DELTA:
            self.size += _size(later)
            merge_deltas(self.item, later)
        else:
            self.item, self.size = later, OUTPUT_BYTES + _size(later)


def merge_deltas(first: RequestOutput, later: RequestOutput) -> None:
    """Append a delta to the one before it, in place."""
    by_index = {completion.index: completion for completion in first.outputs}
    for completion in later.outputs:
        known = by_index.get(completion.index)
        if known is None:
            first.outputs.append(completion)
        else:
            _append(known, completion)
    if later.prompt_logprobs is not None:
        first.prompt_logprobs = later.prompt_logprobs
    if later.scored is not None:
        first.scored = later.scored
    first.finished = later.finished
    first.metrics = later.metrics
    first.num_cached_tokens = later.num_cached_tokens


def _append(known: CompletionOutput, later: CompletionOutput) -> None:
    known.text += later.text
    known.token_ids += later.token_ids
    if known.logprobs is not None and later.logprobs is not None:
        known.logprobs += later.logprobs
    known.cumulative_logprob = later.cumulative_logprob
    known.finish_reason, known.stop_reason = later.finish_reason, later.stop_reason


def _size(output: RequestOutput) -> int:
    """Memory of what an output says, by estimate."""
    candidates, size = 0, 0
    for completion in output.outputs:
        size += TOKEN_BYTES * len(completion.token_ids) + 2 * len(completion.text)
        candidates += sum(map(len, completion.logprobs or ()))
    size += 0 if output.scored is None else len(output.scored.data)
    scores = output.prompt_logprobs
    if isinstance(scores, PromptLogprobs):
        candidates += scores.num_candidates
    else:
        candidates += sum([len(position) for position in scores or () if position])
    return size + LOGPROB_BYTES * candidates
