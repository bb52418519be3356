"""The engine requests behind one HTTP request: submit all, merge their outputs, abort on exit.

Knows nothing of wire formats.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.seeds import prompt_seed
from quire.errors import StepFailed
from quire.logger import get_logger
from quire.outputs import PositionLogprobs, RequestOutput
from quire.params import SamplingParams
from quire.serving.engine_protocol import EngineClient, OutputStream
from quire.serving.server_state import ServerState

logger = get_logger(__name__)

BREATHE_EVERY: Final = 32
"""Prompts after which others get their turn on the event loop."""
_END: Final = None
_Item = tuple[int, RequestOutput] | BaseException | None


@dataclass(frozen=True, slots=True)
class Call:
    """What to ask of the engine."""

    request_ids: list[str]
    """Made unique on submission if a request of the same id is active."""
    prompts: list[list[int]]
    """Token ids, parallel to `request_ids`."""
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    client: str = ""
    """Whose turn it takes under the `fair` policy."""
    trace_headers: dict[str, str] | None = None
    """The caller's trace context."""


class Generation:
    """Submitted requests. Outputs come with the index of their prompt."""

    def __init__(self, scored: bool = False) -> None:
        self.streams: list[OutputStream] = []
        self._scored = scored
        self._scores: dict[int, list[PositionLogprobs | None]] = {}

    @property
    def seed(self) -> int:
        """The base of all seeds: the first prompt's own, from which the others' are made."""
        return self.streams[0].seed

    async def submit(self, engine: EngineClient, call: Call) -> None:
        """Admit every prompt.

        Without a seed the engine chooses one for the first prompt. Each of the others gets its own,
        made of that and its place, so that one number in the reply is enough to repeat the whole
        request. The parameters are checked with the first prompt alone.
        """
        params: SamplingParams | CheckedParams = call.params
        numbered = enumerate(zip(call.request_ids, call.prompts, strict=True), 1)
        for number, (request_id, prompt) in numbered:
            stream = await engine.submit(
                prompt,
                params,
                request_id,
                priority=call.priority,
                cache_salt=call.cache_salt,
                client=call.client,
                trace_headers=call.trace_headers,
            )
            self.streams.append(stream)
            params = stream.checked.with_seed(prompt_seed(self.seed, number))
            if number % BREATHE_EVERY == 0:
                await asyncio.sleep(0)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Outputs of all prompts as they come.

        Raises:
            EngineError: the engine failed; what it said about it is in the log.
        """
        merged = self._single() if len(self.streams) == 1 else self._merged()
        held: dict[int, list[RequestOutput]] = {}
        async with aclosing(merged):
            async for index, output in merged:
                _raise_if_failed(output)
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

    async def aclose(self) -> None:
        """Abort what has not finished."""
        for stream in self.streams:
            await stream.aclose()


async def _pump(index: int, stream: OutputStream, queue: asyncio.Queue[_Item]) -> None:
    try:
        async for output in stream:
            await queue.put((index, output))
        await queue.put(_END)
    except Exception as error:
        await queue.put(error)


def _raise_if_failed(output: RequestOutput) -> None:
    if output.error is None and all(c.finish_reason != "error" for c in output.outputs):
        return
    error_id = uuid.uuid4().hex[:12]
    logger.error("request %s failed (%s): %s", output.request_id, error_id, output.error)
    raise StepFailed(
        "The engine failed on this request; others were not disturbed. "
        f"The log has more under {error_id}."
    )


@asynccontextmanager
async def generate(
    state: ServerState, engine: EngineClient, call: Call
) -> AsyncIterator[Generation]:
    """Submit a call; on exit, whatever has not finished is aborted.

    Raises:
        RequestError: the engine refuses a prompt; those before it are aborted.
    """
    generation = Generation(scored=call.params.prompt_logprobs is not None)
    request_ids = [state.unused_id(wanted) for wanted in call.request_ids]
    state.in_flight += 1
    state.active_ids.update(request_ids)
    try:
        await generation.submit(engine, replace(call, request_ids=request_ids))
        yield generation
    finally:
        state.in_flight -= 1
        state.active_ids.difference_update(request_ids)
        await generation.aclose()
