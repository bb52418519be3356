"""The outputs of one HTTP request for text: those of all its prompts, merged as they come.

Knows nothing of wire formats.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Final

from quire.outputs import PositionLogprobs, RequestOutput
from quire.params import SamplingParams
from quire.serving.engine_protocol import EngineClient, OutputStream
from quire.serving.server_state import ServerState
from quire.serving.submission import Submission, request_failed, submitted

_END: Final = None
_Item = tuple[int, RequestOutput] | BaseException | None


class Generation:
    """Submitted requests. Outputs come with the index of their prompt."""

    def __init__(self, streams: list[OutputStream], scored: bool = False) -> None:
        self.streams = streams
        self._scored = scored
        self._scores: dict[int, list[PositionLogprobs | None]] = {}

    @property
    def seed(self) -> int:
        """The base of all seeds: the first prompt's own, from which the others' are made."""
        return self.streams[0].seed

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Outputs of all prompts as they come.

        Raises:
            EngineError: the engine failed; what it said about it is in the log.
        """
        merged = self._single() if len(self.streams) == 1 else self._merged()
        held: dict[int, list[RequestOutput]] = {}
        async with aclosing(merged):
            async for index, output in merged:
                if output.error is not None or any(
                    c.finish_reason == "error" for c in output.outputs
                ):
                    raise request_failed(output)
                if self._scored:
                    for released in self._with_scores(index, output, held):
                        yield index, released
                else:
                    yield index, output

    def _with_scores(
        self, index: int, output: RequestOutput, held: dict[int, list[RequestOutput]]
    ) -> list[RequestOutput]:
        """Outputs that may go out, each with its prompt's log-probabilities.

        They come once, with whichever completion is first; a reply needs them at the beginning of
        every choice. So what comes before them waits.
        """
        waiting = held.setdefault(index, [])
        waiting.append(output)
        if output.prompt_logprobs is not None:
            self._scores[index] = output.prompt_logprobs
        elif index not in self._scores and not output.finished:
            return []
        held[index] = []
        for released in waiting:
            released.prompt_logprobs = self._scores.get(index)
        return waiting

    async def _single(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        async for output in self.streams[0]:
            yield 0, output

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        # Bounded, so that a slow reader holds back the streams, which then merge their deltas.
        queue: asyncio.Queue[_Item] = asyncio.Queue(len(self.streams))
        pumps = [
            asyncio.ensure_future(_pump(i, stream, queue)) for i, stream in enumerate(self.streams)
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


async def _pump(index: int, stream: OutputStream, queue: asyncio.Queue[_Item]) -> None:
    try:
        async for output in stream:
            await queue.put((index, output))
        await queue.put(_END)
    except Exception as error:
        await queue.put(error)


@asynccontextmanager
async def generate(
    state: ServerState, engine: EngineClient, submission: Submission
) -> AsyncIterator[Generation]:
    """Submit prompts for text; on exit, whatever has not finished is aborted.

    Raises:
        RequestError: the engine refuses a prompt; those before it are aborted.
    """
    assert isinstance(submission.params, SamplingParams), "text is made by sampling"
    async with submitted(state, engine, submission) as streams:
        yield Generation(streams, submission.params.prompt_logprobs is not None)
