"""`POST /classify`: the likeliest label of each prompt, and the probabilities of all."""

from __future__ import annotations

from typing import Any

from quire.serving.exchange import Exchange
from quire.serving.pooling.inputs import base_params, check_base, read_inputs
from quire.serving.pooling.results import Result, list_reply, pool
from quire.serving.pooling.schema import INPUT_UNSUPPORTED, ClassificationRequest


async def classify(exchange: Exchange) -> None:
    """Classify each input.

    Raises:
        RequestError: the request is invalid, or the model is no classifier.
    """
    request = await exchange.record(ClassificationRequest, INPUT_UNSUPPORTED)
    served = exchange.admit(request.model)
    engine = served.engine
    pooler = check_base(exchange, request, engine)
    params = base_params(request, "classify", request.activation)
    prompts = await read_inputs(engine, request, params)

    async def work() -> None:
        results = await pool(exchange, engine, request, prompts, "classify")
        rows = [_row(i, result, pooler.labels) for i, result in enumerate(results)]
        name = f"classify-{request.request_id or exchange.request_id}"
        await exchange.reply(list_reply(name, exchange.created, served.name, rows, results))

    await exchange.while_connected(work())


def _row(index: int, result: Result, labels: tuple[str, ...]) -> dict[str, Any]:
    probs = result.outputs.data.tolist()
    best = max(range(len(probs)), key=probs.__getitem__)
    return {"index": index, "label": labels[best], "probs": probs, "num_classes": len(probs)}
