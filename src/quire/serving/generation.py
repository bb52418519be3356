"""One HTTP request for text: submits its prompts, and gives the model's output as turn events.

Knows nothing of wire formats.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, Protocol

import msgspec

from quire.engine.frontend.stream import Outbox, Pipe, RequestStream
from quire.outputs import RequestOutput
from quire.serving.engine_protocol import EngineClient, OutputStream
from quire.serving.exchange import Exchange
from quire.serving.field_names import AS_THE_ENGINE, FieldNames
from quire.serving.load_report import ASKED, load_report
from quire.serving.request_metrics import request_metrics
from quire.serving.stream_positions import EventIds
from quire.serving.submission import Submission, submitted
from quire.serving.turn_reader import TurnReader
from quire.serving.turns import Batch, ModelTurn, Usage

encode: Final = msgspec.json.encode
_END: Final = None
_Item = tuple[int, RequestOutput] | BaseException | None


class WholeTurns(Protocol):
    """What a whole reply is made of."""

    @property
    def seed(self) -> int:
        """The base of all seeds."""
        ...

    @property
    def usage(self) -> Usage:
        """Token counts, final once there are turns."""
        ...

    @property
    def metrics(self) -> dict[str, Any]:
        """The field `metrics` of the reply, if it has one."""
        ...

    async def turns(self) -> list[ModelTurn]:
        """All choices in order, complete."""
        ...


class Outlet(Protocol):
    """The reply on its way to the client."""

    bytes_out: int
    """Written so far."""

    @property
    def pipe(self) -> Pipe | None:
        """The connection, where frames can be written without detours."""
        ...

    def write_now(self, frames: bytes) -> bool:
        """Send finished frames if that can be done without waiting; with no bytes, tell whether it
        can."""
        ...


class _TextWay:
    """Sends the text of the one choice of a reply as the engine brings it: all that a token costs
    between the engine's front end and the socket. It touches few objects, because a process that
    sleeps between steps finds little in its caches.

    Args:
        reader: Of the outputs; it has the first ones.
        outlet: Counts what is written.
        pipe: Where it is written.
        outbox: Sends it with what others have in the same step.
        around: What stands before and after the text, a JSON string.
    """

    __slots__ = (
        "_before", "_after", "_pipe", "_outbox", "_usage", "_outlet", "_is_text", "_reader",
    )  # fmt: skip

    def __init__(
        self,
        reader: TurnReader,
        outlet: Outlet,
        pipe: Pipe,
        outbox: Outbox,
        around: tuple[bytes, bytes],
    ) -> None:
        self._before, self._after = around
        self._pipe = pipe
        self._outbox = outbox
        self._usage = reader.usage
        self._outlet = outlet
        self._is_text = False
        self._reader = reader

    def take(self, new: str, num_tokens: int) -> bool:
        """See `RequestStream.direct_text`."""
        if not self._is_text:
            self._is_text = self._reader.is_text(0)
            if not self._is_text:
                return False
        if new:
            pipe = self._pipe
            if pipe.is_paused:
                return False
            chunk = self._before + encode(new) + self._after
            self._outbox.waiting.append((pipe, chunk))
            self._outlet.bytes_out += len(chunk)
        self._usage.completion_tokens += num_tokens
        return True


class Generation:
    """Submitted requests and their output.

    Args:
        streams: Of the prompts.
        reader: Of their outputs.
        ids: Told what is rendered next, if the reply's events have ids.
        names: What the caller calls the fields that errors name.
        timed: Replies tell timings.
        outlet: Where finished frames go if that can be done without waiting.
    """

    def __init__(
        self,
        streams: list[OutputStream],
        reader: TurnReader,
        ids: EventIds | None = None,
        names: FieldNames = AS_THE_ENGINE,
        *,
        timed: bool = False,
        outlet: Outlet | None = None,
    ) -> None:
        self._outlet = outlet
        self._streams = streams
        self._reader = reader
        self._ids = ids
        self._names = names
        self._timed = timed

    @property
    def seed(self) -> int:
        """The base of all seeds: that of the first prompt, from which the others are derived."""
        return self._streams[0].seed

    @property
    def metrics(self) -> dict[str, Any]:
        """With `--enable-per-request-metrics`, the field `metrics` of a reply that has ended. As in
        vLLM, a request for several completions has none."""
        if not self._timed or len(self._streams) > 1 or self._reader.n > 1:
            return {}
        return {"metrics": request_metrics(self._reader.times)}

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return self._reader.usage

    def render_with(
        self,
        render: Callable[[list[Batch]], bytes],
        around: Callable[[int], tuple[bytes, bytes]] | None = None,
    ) -> None:
        """Have outputs rendered and sent as the engine brings them, as long as the client reads,
        without the detour of waking whoever iterates over `events`: that one gets the rest, in
        order. Only where one prompt is read as it comes; else nothing changes.

        Args:
            render: Gives the frames of events.
            around: Gives what stands before and after the text, a JSON string, where `render` has
                one `Text` event of a choice.
        """
        reader, outlet, stream = self._reader, self._outlet, self._streams[0]
        if outlet is None or self._ids is not None or len(self._streams) > 1 or reader.scored:
            return
        write_now = outlet.write_now

        def direct(output: RequestOutput) -> bool:
            if not write_now(b""):
                return False
            frames = render(reader.read(0, output))
            return not frames or write_now(frames) or _lost()

        if isinstance(stream, RequestStream):
            stream.direct = direct
            if around is not None and (pipe := outlet.pipe) is not None:
                way = _TextWay(reader, outlet, pipe, stream.outbox, around(0))
                stream.direct_text = way.take

    async def events(self) -> AsyncGenerator[list[Batch]]:
        """The events of all choices as they arrive, those of one engine output at a time. `usage`
        is final after the last one.

        Raises:
            EngineError: the engine failed; what it said about it is in the log.
        """
        reader = self._reader
        with self._names.told():
            if self._ids is not None:
                async with aclosing(self._named(self._ids)) as named:
                    async for batches in named:
                        yield batches
            elif len(self._streams) == 1 and not reader.scored:  # most: no detours per token
                async for output in self._streams[0]:
                    yield reader.read(0, output)
            else:
                async with aclosing(self._merged()) as merged:
                    async for prompt_index, output in merged:
                        for released in reader.release(prompt_index, output):
                            yield reader.read(prompt_index, released)

    async def _named(self, ids: EventIds) -> AsyncGenerator[list[Batch]]:
        """The events one batch at a time, each after `ids` were told what it is made of."""
        reader = self._reader
        ids.begin(len(self._streams) * reader.n)
        async with aclosing(self._merged()) as merged:
            async for prompt_index, output in merged:
                for released in reader.release(prompt_index, output):
                    units = _units(prompt_index * reader.n, released)
                    batches = {
                        batch[0].choice: batch for batch in reader.read(prompt_index, released)
                    }
                    for choice, num_tokens, ends in units:
                        ids.enter(choice, num_tokens, ends)
                        if choice in batches:
                            yield [batches[choice]]
        ids.enter_end()

    async def turns(self) -> list[ModelTurn]:
        """All choices in order, complete: the fold of `events`.

        Raises:
            EngineError: the engine failed; what it said about it is in the log.
        """
        turns: dict[int, ModelTurn] = {}
        async for batches in self.events():
            for batch in batches:
                choice = batch[0].choice
                turns.setdefault(choice, ModelTurn(choice)).add(batch)
        return [turns[choice] for choice in sorted(turns)]

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Outputs of all prompts as they arrive, each with the index of its prompt."""
        # Bounded, so that a slow reader holds back the streams, which then merge their deltas.
        queue: asyncio.Queue[_Item] = asyncio.Queue(len(self._streams))
        pumps = [
            asyncio.ensure_future(_pump(i, stream, queue)) for i, stream in enumerate(self._streams)
        ]
        try:
            open_streams = len(pumps)
            while open_streams:
                item = await queue.get()
                if item is _END:
                    open_streams -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


def _lost() -> bool:
    raise AssertionError("what was free a moment ago is not")


def _units(first_choice: int, output: RequestOutput) -> list[tuple[int, int, bool]]:
    """Choice, tokens, and whether it ends, of each completion in an output."""
    return [
        (first_choice + one.index, len(one.token_ids), one.finish_reason is not None)
        for one in output.outputs
    ]


async def _pump(index: int, stream: OutputStream, queue: asyncio.Queue[_Item]) -> None:
    try:
        async for output in stream:
            await queue.put((index, output))
        await queue.put(_END)
    except Exception as error:
        await queue.put(error)


@asynccontextmanager
async def generate(
    exchange: Exchange, engine: EngineClient, submission: Submission, reader: TurnReader
) -> AsyncIterator[Generation]:
    """Submit prompts for text; on exit, whatever has not finished is aborted.

    Raises:
        RequestError: the engine refuses a prompt; those before it are aborted.
    """
    ids = None if exchange.kept is None else exchange.kept.ids
    async with submitted(exchange.state, engine, submission, exchange.durable) as streams:
        if (asked := exchange.header(ASKED)) is not None:
            exchange.tell_load = lambda: load_report(asked, engine.last_step)
        timed = exchange.config.enable_per_request_metrics
        yield Generation(streams, reader, ids, submission.names, timed=timed, outlet=exchange)
