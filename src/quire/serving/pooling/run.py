"""The engine requests behind one pooling request: submit all, collect, abort on exit.

Knows nothing of wire formats.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import StepFailed
from quire.logger import get_logger
from quire.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.params import PoolingParams
from quire.serving.engine_protocol import EngineClient, OutputStream
from quire.serving.exchange import Exchange
from quire.serving.generation import BREATHE_EVERY
from quire.serving.pooling.schema import PoolingBase

logger = get_logger(__name__)

Result = PoolingRequestOutput[PoolingOutput]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one engine request computes."""

    token_ids: list[int]
    params: PoolingParams


async def pool(
    exchange: Exchange,
    engine: EngineClient,
    request: PoolingBase,
    prompts: Sequence[Prompt],
    prefix: str,
) -> list[Result]:
    """Results of all prompts, in their order; if one is refused or fails, all are ended.

    Raises:
        RequestError: the engine refuses a prompt.
        EngineError: the engine failed; what it said about it is in the log.
    """
    state = exchange.state
    name = f"{prefix}-{request.request_id or exchange.request_id}"
    ids = [state.unused_id(f"{name}-{i}") for i in range(len(prompts))]
    streams: list[OutputStream] = []
    state.in_flight += 1
    state.active_ids.update(ids)
    try:
        for number, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True), 1):
            stream = await engine.submit(
                prompt.token_ids,
                prompt.params,
                request_id,
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
                client=exchange.client(request.user),
                trace_headers=exchange.trace_headers(),
            )
            streams.append(stream)
            if number % BREATHE_EVERY == 0:
                await asyncio.sleep(0)
        return [await _last(stream) for stream in streams]
    finally:
        state.in_flight -= 1
        state.active_ids.difference_update(ids)
        for stream in streams:
            await stream.aclose()


async def _last(stream: OutputStream) -> Result:
    final: RequestOutput | None = None
    async for final in stream:  # noqa: B007 - there is only one, at the end
        pass
    assert final is not None, "a stream ended without an output"
    if final.pooled is None:
        error_id = uuid.uuid4().hex[:12]
        logger.error("request %s failed (%s): %s", final.request_id, error_id, final.error)
        raise StepFailed(
            "The engine failed on this request; others were not disturbed. "
            f"The log has more under {error_id}."
        )
    return PoolingRequestOutput.of(final)


def usage(results: Sequence[Result]) -> dict[str, int]:
    """OpenAI's usage object, for prompts alone."""
    count = sum(len(result.prompt_token_ids) for result in results)
    return {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
