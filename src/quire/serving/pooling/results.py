"""The results of all prompts of one pooling request, and the replies that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.params import PoolingParams
from quire.serving.engine_protocol import EngineClient, OutputStream
from quire.serving.exchange import Exchange
from quire.serving.field_names import AS_THE_ENGINE, FieldNames
from quire.serving.pooling.schema import InputRequest, PoolingBase
from quire.serving.submission import Submission, request_failed, submitted

Result = PoolingRequestOutput[PoolingOutput]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, and how it is pooled."""

    token_ids: list[int]
    params: PoolingParams


def prompt_names(request: PoolingBase) -> FieldNames:
    """What a request calls its prompts. Texts of a score come from several fields."""
    if not isinstance(request, InputRequest):
        return AS_THE_ENGINE
    return FieldNames(others={"prompt": "input" if request.messages is None else "messages"})


async def pool(
    exchange: Exchange,
    engine: EngineClient,
    request: PoolingBase,
    prompts: Sequence[Prompt],
    prefix: str,
) -> list[Result]:
    """The results of all prompts, in order; if one is refused or fails, all are aborted.

    Raises:
        RequestError: the engine refuses a prompt.
        EngineError: the engine failed; what it said about it is in the log.
    """
    name = f"{prefix}-{request.request_id or exchange.request_id}"
    submission = Submission(
        [f"{name}-{i}" for i in range(len(prompts))],
        [prompt.token_ids for prompt in prompts],
        [prompt.params for prompt in prompts],
        request.priority or 0,
        request.cache_salt,
        exchange.client(request.user),
        exchange.trace_headers(),
        exchange.deadline,
        prompt_names(request),
    )
    async with submitted(exchange.state, engine, submission, exchange.durable) as streams:
        return [await _last(stream) for stream in streams]


async def _last(stream: OutputStream) -> Result:
    final: RequestOutput | None = None
    async for final in stream:  # noqa: B007 - there is only one, at the end
        pass
    assert final is not None, "a stream ended without an output"
    if final.pooled is None:
        raise request_failed(final)
    return PoolingRequestOutput.of(final)


def usage(results: Sequence[Result]) -> dict[str, int]:
    """OpenAI's usage object, for prompts alone."""
    count = sum(len(result.prompt_token_ids) for result in results)
    return {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}


def list_reply(
    name: str, created: int, model: str, rows: list[dict[str, Any]], results: list[Result]
) -> bytes:
    """The reply that all endpoints but reranking have: a list with a row per prompt.

    Args:
        created: When the request came, in seconds since 1970.
    """
    head = {"id": name, "object": "list", "created": created, "model": model}
    return msgspec.json.encode(head | {"data": rows, "usage": usage(results)})
