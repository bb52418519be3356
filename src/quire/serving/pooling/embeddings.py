"""`POST /v1/embeddings` and `POST /pooling`: vectors for each prompt, as lists or base64."""

from __future__ import annotations

import base64
from typing import Any, TypeVar

from quire.errors import InvalidRequest
from quire.serving.decode import show
from quire.serving.exchange import Exchange
from quire.serving.pooling.inputs import base_params, check_base, read_inputs
from quire.serving.pooling.results import Result, list_reply, pool
from quire.serving.pooling.schema import INPUT_UNSUPPORTED, EmbeddingRequest, PoolingRequest

FORMATS = ("float", "base64")
R = TypeVar("R", bound=EmbeddingRequest)


async def embeddings(exchange: Exchange) -> None:
    """An embedding of each input.

    Raises:
        RequestError: the request is invalid, or the model gives no embeddings.
    """
    await _answer(exchange, EmbeddingRequest, "embd", "embedding", "embedding")


async def pooling(exchange: Exchange) -> None:
    """What the model pools, whatever it is made for.

    Raises:
        RequestError: the request is invalid, or the model generates text.
    """
    await _answer(exchange, PoolingRequest, "pool", "pooling", "data")


async def _answer(
    exchange: Exchange, kind: type[R], prefix: str, object_name: str, field: str
) -> None:
    request = await exchange.record(kind, INPUT_UNSUPPORTED)
    served = exchange.admit(request.model)
    engine = served.engine
    pooler = check_base(exchange, request, engine)
    form = request.encoding_format or "float"
    if form not in FORMATS:
        raise InvalidRequest(
            f"encoding_format must be one of {', '.join(FORMATS)}, got {show(form)}.",
            param="encoding_format",
        )
    task = request.task if isinstance(request, PoolingRequest) else "embed"
    params = base_params(request, task or pooler.task, request.normalize, request.dimensions)
    prompts = await read_inputs(engine, request, params)

    async def work() -> None:
        results = await pool(exchange, engine, request, prompts, prefix)
        rows = [
            {"index": i, "object": object_name, field: _numbers(result, form)}
            for i, result in enumerate(results)
        ]
        name = f"{prefix}-{request.request_id or exchange.request_id}"
        await exchange.reply(list_reply(name, exchange.created, served.name, rows, results))

    await exchange.while_connected(work())


def _numbers(result: Result, form: str) -> Any:
    data = result.outputs.data
    return data.tolist() if form == "float" else base64.b64encode(data.tobytes()).decode()
