"""`POST /v1/completions`: from the body, with one or several prompts, to checked requests.

`completion_reply.py` says what replies look like.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Final

import msgspec

from quire.errors import InvalidRequest
from quire.serving.checks import truncate
from quire.serving.engine_protocol import EngineClient
from quire.serving.exchange import Exchange
from quire.serving.generation import generate
from quire.serving.limits import PROMPTS, check_prompts
from quire.serving.openai.completion_reply import (
    CompletionReply,
    stream_frames,
    whole_reply,
)
from quire.serving.openai.reply import ReplyHead, usage_each
from quire.serving.openai.sampling import build_params, check_common
from quire.serving.openai.schema import COMPLETION_UNSUPPORTED, CompletionRequest
from quire.serving.prompts import check_ids, encode_all
from quire.serving.rendered import rendered
from quire.serving.server_state import ServedModel, require_runner
from quire.serving.streaming import send_stream
from quire.serving.submission import Submission
from quire.serving.token_texts import TokenTexts
from quire.serving.turn_reader import TurnReader

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default on this endpoint."""


@dataclass(frozen=True, slots=True)
class _Completion:
    """A checked request: what to submit, how to parse the output, and how to format the reply."""

    submission: Submission
    reader: TurnReader
    reply: CompletionReply


async def completions(exchange: Exchange) -> None:
    """Continue one or more texts.

    Raises:
        RequestError: the request is invalid; nothing has been sent yet.
    """
    request = await exchange.record(CompletionRequest, COMPLETION_UNSUPPORTED)
    served = exchange.state.model_for(request.model)
    asked = await _prepare(exchange, served, request)
    await exchange.while_connected(_answer(exchange, served.engine, asked))


async def render_completion_request(exchange: Exchange) -> None:
    """Give texts as `/inference/v1/generate` takes them, one request each, and compute nothing.

    Raises:
        RequestError: the request is invalid.
    """
    request = await exchange.record(CompletionRequest, COMPLETION_UNSUPPORTED)
    served = exchange.state.model_for(request.model)
    asked = await _prepare(exchange, served, request)
    found = rendered(asked.submission, served, bool(request.stream))
    await exchange.reply(msgspec.json.encode(found))


async def _prepare(
    exchange: Exchange, served: ServedModel, request: CompletionRequest
) -> _Completion:
    engine = served.engine
    require_runner(engine, "generate")
    check_common(request, engine)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest(
            f"best_of is not supported: leave it out or set it to n ({request.n or 1}), "
            f"got {request.best_of}.",
            param="best_of",
        )
    max_tokens = _max_tokens(request)
    prompts = _prompts(request)
    params = build_params(
        request,
        engine.default_params,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=_prompt_logprobs(request),
        prompts=len(prompts),
    )
    room = engine.max_model_len - max_tokens
    ids = [truncate(found, request, room) for found in await _encode(engine, prompts, request)]
    check_prompts([len(i) for i in ids], params.n, params.prompt_logprobs, engine.vocab_size)
    request_id = f"cmpl-{request.request_id or exchange.request_id}"
    submission = Submission(
        [f"{request_id}-{i}" for i in range(len(ids))],
        ids,
        params,
        request.priority or 0,
        request.cache_salt,
        exchange.client(request.user),
        exchange.trace_headers(),
        exchange.deadline,
    )
    head = ReplyHead(
        request_id, "text_completion", served.name, served.fingerprint, exchange.created
    )
    tokens = request.logprobs is not None or request.return_token_ids or usage_each(request)
    texts = TokenTexts(engine.tokenizer, bool(request.return_tokens_as_token_ids))
    echoes = [_echo(engine, request, prompts[i], cut) for i, cut in enumerate(ids)]
    return _Completion(
        submission,
        TurnReader(params, tokens=bool(tokens), prompt_only=request.max_tokens == 0),
        CompletionReply(request, head, texts, echoes, shows_tokens=bool(tokens)),
    )


def _max_tokens(request: CompletionRequest) -> int:
    if request.max_tokens is None:
        return DEFAULT_MAX_TOKENS
    return 1 if request.max_tokens == 0 and request.echo else request.max_tokens


def _prompt_logprobs(request: CompletionRequest) -> int | None:
    """How many prompt logprobs to ask for: echoed logprobs need those of the prompt, and at least
    as many as the output's."""
    asked, echoed = request.prompt_logprobs, request.logprobs if request.echo else None
    if asked is None or echoed is None:
        return echoed if asked is None else asked
    return -1 if -1 in (asked, echoed) else max(asked, echoed)


def _prompts(request: CompletionRequest) -> list[str] | list[list[int]]:
    """The four shapes of `prompt` as a list of texts or of token lists."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if not prompt or len(kinds) > 1:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such "
            f"lists, got {'an empty' if not prompt else 'a mixed'} list.",
            param="prompt",
        )
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    PROMPTS.check(len(prompt), "prompt")
    if kinds == {str}:
        return [item for item in prompt if isinstance(item, str)]
    return [item for item in prompt if isinstance(item, list)]


async def _encode(
    engine: EngineClient, prompts: list[str] | list[list[int]], request: CompletionRequest
) -> list[list[int]]:
    """Token ids of each prompt."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        cut = request.truncate_prompt_tokens is not None
        return await encode_all(engine, texts, request.add_special_tokens is not False, cut=cut)
    given = [prompt for prompt in prompts if isinstance(prompt, list)]
    check_ids(list(chain.from_iterable(given)), engine.vocab_size, "prompt")
    return given


def _echo(
    engine: EngineClient, request: CompletionRequest, prompt: str | list[int], ids: list[int]
) -> str:
    if not request.echo:
        return ""
    if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
        return prompt
    return engine.tokenizer.decode(
        ids, skip_special_tokens=request.skip_special_tokens is not False
    )


async def _answer(exchange: Exchange, engine: EngineClient, asked: _Completion) -> None:
    async with generate(exchange, engine, asked.submission, asked.reader) as generation:
        if asked.reply.request.stream:
            await send_stream(exchange, stream_frames(asked.reply, generation))
        else:
            await exchange.reply(await whole_reply(asked.reply, generation))
