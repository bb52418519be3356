"""`POST /inference/v1/generate`: token ids and sampling parameters in, token ids out.

For servers that tokenise elsewhere. The body is what a render route gives; nothing is rendered,
tokenised or parsed here.
"""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, ClassVar, Final

import msgspec

from quire.errors import InvalidRequest
from quire.params import SamplingParams
from quire.serving.checks import check_labels, make_params
from quire.serving.decode import Unsupported, refused
from quire.serving.exchange import Exchange
from quire.serving.field_names import FieldNames
from quire.serving.generation import Generation, generate
from quire.serving.large_json import Splices, glued, made, spliced_entries, spliced_scores
from quire.serving.limits import SCORED, check_prompts
from quire.serving.prompts import check_ids
from quire.serving.rendered import FILLED_IN
from quire.serving.server_state import ServedModel, require_runner
from quire.serving.streaming import send_stream
from quire.serving.submission import Submission
from quire.serving.token_texts import TokenTexts
from quire.serving.turn_reader import TurnReader
from quire.serving.turns import Batch, Begin, ModelTurn, PromptInfo, num_candidates, num_scored
from quire.serving.unread_fields import unread_fields

KNOWN: Final = tuple(name for name in SamplingParams.__struct_fields__ if name not in FILLED_IN)
OWN_NAMES: Final = FieldNames(
    others={"prompt": "token_ids", **{name: f"sampling_params.{name}" for name in KNOWN}}
)


class TokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /inference/v1/generate`."""

    FREE_FORM: ClassVar[tuple[str, ...]] = ("sampling_params",)

    token_ids: list[int]
    sampling_params: dict[str, Any]
    """By the names of vLLM's `SamplingParams`, which also has the defaults."""
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


UNSUPPORTED: Final[dict[str, Unsupported]] = {
    "features": refused("this server takes and gives text only"),
    "stream_options": refused("the last chunk of each stream has the usage", {}),
    "kv_transfer_params": refused("KV transfer between servers is not available"),
}


async def generate_tokens(exchange: Exchange) -> None:
    """Continue a prompt of token ids.

    Raises:
        RequestError: the request is invalid; nothing has been sent yet.
    """
    request = await exchange.record(TokensRequest, UNSUPPORTED)
    served = exchange.admit(request.model)
    engine = served.engine
    require_runner(engine, "generate")
    check_labels(request)
    priority = exchange.priority(request.priority, engine.config.scheduler.scheduling_policy)
    check_ids(request.token_ids, engine.vocab_size, "token_ids")
    params = _params(request, served, exchange.state.config.max_n_sequences)
    lengths = [len(request.token_ids)]
    check_prompts(lengths, params.n, params.prompt_logprobs, engine.vocab_size, "token_ids")
    _check_scored(request, params)
    request_id = request.request_id or exchange.request_id
    submission = Submission(
        [request_id],
        [request.token_ids],
        params,
        priority,
        request.cache_salt,
        exchange.client(None),
        exchange.trace_headers(),
        exchange.deadline,
        OWN_NAMES,
    )
    reader = TurnReader(params, tokens=True)
    texts = TokenTexts(engine.tokenizer, False)

    async def answer() -> None:
        async with generate(exchange, engine, submission, reader) as generation:
            if request.stream:
                await send_stream(exchange, _chunks(request_id, generation, texts))
            else:
                await exchange.reply(await _whole(request_id, generation, texts))

    await exchange.while_connected(answer())


def _params(request: TokensRequest, served: ServedModel, most: int) -> SamplingParams:
    given = {
        name: value
        for name, value in request.sampling_params.items()
        if value is not None or name == "max_tokens"  # null: up to the end of the context
    }
    for name in [name for name in given if name not in KNOWN]:
        unread_fields().unknown(name, KNOWN, "sampling_params")
        del given[name]
    try:
        # As JSON numbers keys of objects: by their text.
        if isinstance(bias := given.get("logit_bias"), dict):
            given["logit_bias"] = {_number(key): value for key, value in bias.items()}
        params = make_params(SamplingParams(), given, stream=request.stream, most=most)
        params = served.parsers.in_prompts(params, [request.token_ids], served.engine.tokenizer)
        return served.parsers.mark_thinking(params)
    except InvalidRequest as error:
        param = error.param and f"sampling_params.{error.param}"
        raise InvalidRequest(error.message, param=param) from None


def _check_scored(request: TokensRequest, params: SamplingParams) -> None:
    rows = params.prompt_logprob_token_ids
    if rows is None:
        return
    if request.stream:
        raise InvalidRequest(
            "The scores of prompt_logprob_token_ids come with whole replies only: leave out stream "
            "or set it to false, got true.",
            param="stream",
        )
    name = "sampling_params.prompt_logprob_token_ids"
    SCORED.check(len(rows) * max(map(len, rows)), name)


def _number(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() and len(key) < 20 else key


def _usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


async def _whole(request_id: str, generation: Generation, texts: TokenTexts) -> list[bytes]:
    """The reply in pieces."""
    turns = await generation.turns()

    def work() -> list[bytes]:
        splices = Splices()
        body = {
            "request_id": request_id,
            "choices": [_choice(turn, texts, splices) for turn in turns],
            "usage": _usage(generation),
            "seed": generation.seed,
            **_prompt(turns[0].prompt, splices),
            **generation.metrics,
        }
        return splices.fill(msgspec.json.encode(body))

    pieces: list[bytes] = await made(num_scored(turns), work)
    return pieces


def _prompt(prompt: PromptInfo | None, splices: Splices) -> dict[str, Any]:
    """What was asked of the prompt: log-probabilities as an object by token id for each position,
    scores of named tokens as base64 of an `.npy` file, float32 `[rows, candidates]`."""
    told: dict[str, Any] = {}
    if prompt is not None and prompt.logprobs is not None:
        told["prompt_logprobs"] = splices.raw(spliced_scores(prompt.logprobs))
    if prompt is not None and prompt.scored is not None:
        import numpy as np

        with io.BytesIO() as file:
            np.save(file, prompt.scored.array(), allow_pickle=False)
            told["prompt_token_id_logprobs"] = base64.b64encode(file.getbuffer()).decode()
    return told


def _choice(turn: ModelTurn, texts: TokenTexts, splices: Splices) -> dict[str, Any]:
    scores = None
    if turn.logprobs is not None:
        entries = spliced_entries(turn.token_ids, turn.logprobs, -1, texts, splices)
        scores = {"content": entries}
    return {
        "index": turn.choice,
        "token_ids": turn.token_ids,
        "logprobs": scores,
        "finish_reason": turn.finish and turn.finish.reason,
        "stop_reason": turn.finish and turn.finish.stop_reason,
    }


async def _chunks(
    request_id: str, generation: Generation, texts: TokenTexts
) -> AsyncGenerator[bytes]:
    """A chunk for each output of a choice, then one with the usage."""
    async for batches in generation.events():
        frames: list[bytes] = []
        for batch in batches:
            event = batch[0]
            size = num_candidates(event.prompt.logprobs) if type(event) is Begin else 0
            frames += await made(size, partial(_chunk, request_id, batch, texts))
        if frames:
            yield await glued(frames)
    last = {
        "request_id": request_id,
        "choices": [],
        "usage": _usage(generation),
        "seed": generation.seed,
        **generation.metrics,
    }
    yield b"data: %b\n\n" % msgspec.json.encode(last)


def _chunk(request_id: str, batch: Batch, texts: TokenTexts) -> list[bytes]:
    turn, splices = ModelTurn(batch[0].choice).add(batch), Splices()
    chunk = {"request_id": request_id, "choices": [_choice(turn, texts, splices)]}
    if turn.choice == 0:
        chunk |= _prompt(turn.prompt, splices)
    return [b"data: ", *splices.fill(msgspec.json.encode(chunk)), b"\n\n"]
