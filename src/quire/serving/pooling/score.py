"""`POST /score` and `POST /rerank`: how well texts match.

A cross-encoder reads each pair; an embedding model compares two embeddings by cosine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.bounds import read_field
from quire.config import PoolerSpec
from quire.errors import InvalidRequest
from quire.outputs import cosine
from quire.params import PoolingParams
from quire.serving.engine_protocol import EngineClient
from quire.serving.exchange import Exchange
from quire.serving.pooling.inputs import (
    base_params,
    check_base,
    check_count,
    check_lengths,
    read_pairs,
)
from quire.serving.pooling.results import Prompt, Result, list_reply, pool, usage
from quire.serving.pooling.schema import PAIR_UNSUPPORTED, RerankRequest, ScoreRequest
from quire.serving.prompts import check_text_length, off_loop

FIRST, SECOND = ("queries", "text_1", "data_1"), ("documents", "items", "text_2", "data_2")
"""Names of the two sides of `/score`."""
Request = ScoreRequest | RerankRequest


async def score(exchange: Exchange) -> None:
    """Score pairs: one text against many, or as many against as many.

    Raises:
        RequestError: the request is invalid, or the model cannot score.
    """
    request = await exchange.record(ScoreRequest, PAIR_UNSUPPORTED)
    served = exchange.admit(request.model)
    engine = served.engine
    pooler = check_base(exchange, request, engine)
    first, second = _sides(request)

    async def work() -> None:
        scores, results = await _scores(exchange, engine, pooler, request, first, second, "score")
        rows: list[dict[str, Any]] = [
            {"index": i, "object": "score", "score": value} for i, value in enumerate(scores)
        ]
        name = f"score-{request.request_id or exchange.request_id}"
        await exchange.reply(list_reply(name, exchange.created, served.name, rows, results))

    await exchange.while_connected(work())


async def rerank(exchange: Exchange) -> None:
    """Order documents by how well they answer a query.

    Raises:
        RequestError: the request is invalid, or the model cannot score.
    """
    request = await exchange.record(RerankRequest, PAIR_UNSUPPORTED)
    served = exchange.admit(request.model)
    engine = served.engine
    pooler = check_base(exchange, request, engine)
    if request.top_n is not None:
        read_field("top_n", request.top_n)
    documents = [d if isinstance(d, str) else d.text for d in request.documents]
    check_count(len(documents), "documents")

    async def work() -> None:
        queries = [request.query] * len(documents)
        found = await _scores(exchange, engine, pooler, request, queries, documents, "rerank")
        body = _ranking(exchange, request, served.name, documents, *found)
        await exchange.reply(msgspec.json.encode(body))

    await exchange.while_connected(work())


def _ranking(
    exchange: Exchange,
    request: RerankRequest,
    model: str,
    documents: list[str],
    scores: list[float],
    results: list[Result],
) -> dict[str, Any]:
    """Best first; equal scores keep the order of the documents."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    shown = request.return_documents is not False
    return {
        "id": f"rerank-{request.request_id or exchange.request_id}",
        "model": model,
        "usage": usage(results),
        "results": [
            {
                "index": i,
                **({"document": {"text": documents[i]}} if shown else {}),
                "relevance_score": scores[i],
            }
            for i in order[: request.top_n or None]
        ],
    }


def _sides(request: ScoreRequest) -> tuple[list[str], list[str]]:
    """Both sides at equal length: one text goes with each of the other side."""
    sides = []
    for names in (FIRST, SECOND):
        given = {name: getattr(request, name) for name in names}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            what = "Give one" if not given else "Give only one"
            raise InvalidRequest(f"{what} of {', '.join(names)}.", param=names[0])
        ((name, value),) = given.items()
        texts = [value] if isinstance(value, str) else value
        check_count(len(texts), name)
        sides.append((name, texts))
    (name, first), (other, second) = sides
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidRequest(
            f"{name} must hold one text, or as many as {other} ({len(second)}), got {len(first)}.",
            param=name,
        )
    return first, second


async def _scores(
    exchange: Exchange,
    engine: EngineClient,
    pooler: PoolerSpec,
    request: Request,
    first: list[str],
    second: list[str],
    prefix: str,
) -> tuple[list[float], list[Result]]:
    """A score per pair, and what was computed for them."""
    longest = (request.max_tokens_per_query, request.max_tokens_per_doc)
    check_lengths(*longest)
    if pooler.task == "embed":
        return await _cosines(exchange, engine, request, first, second, prefix)
    params = base_params(request, "score", request.activation)
    pairs = list(zip(first, second, strict=True))
    prompts = await read_pairs(engine, request, params, pairs, *longest)
    results = await pool(exchange, engine, request, prompts, prefix)
    return [float(result.outputs.data[0]) for result in results], results


async def _cosines(
    exchange: Exchange,
    engine: EngineClient,
    request: Request,
    first: list[str],
    second: list[str],
    prefix: str,
) -> tuple[list[float], list[Result]]:
    """Each text is embedded once, however often it occurs on its side."""
    params = base_params(request, "embed", request.activation)
    sides = (first, request.max_tokens_per_query), (second, request.max_tokens_per_doc)
    keys = [(text, most) for texts, most in sides for text in texts]
    unique = list(dict.fromkeys(keys))
    prompts = await _embedding_prompts(engine, request, params, unique)
    results = await pool(exchange, engine, request, prompts, prefix)
    vectors = {key: result.outputs.data for key, result in zip(unique, results, strict=True)}
    pairs = zip(keys[: len(first)], keys[len(first) :], strict=True)
    return [cosine(vectors[one], vectors[two]) for one, two in pairs], results


async def _embedding_prompts(
    engine: EngineClient,
    request: Request,
    params: PoolingParams,
    texts: list[tuple[str, int | None]],
) -> list[Prompt]:
    """Prompts from texts, each with the largest number of tokens it may have."""
    special = request.add_special_tokens is not False
    keep = request.truncate_prompt_tokens
    room = engine.max_model_len if keep == -1 else keep
    limits = [[x for x in (room, most) if x is not None] for _, most in texts]
    check_text_length(
        engine, [text for (text, _), cut in zip(texts, limits, strict=True) if not cut]
    )
    tokenizer, side = engine.tokenizer, request.truncation_side or "right"

    def ids(text: str, cut: list[int]) -> list[int]:
        if cut:
            return tokenizer.encode_within(text, min(cut), side, special)
        return tokenizer.encode(text, add_special_tokens=special)

    def work() -> list[Prompt]:
        found = zip(texts, limits, strict=True)
        return [Prompt(ids(text, cut), params) for (text, _), cut in found]

    return await off_loop(sum(len(text) for text, _ in texts), work)
