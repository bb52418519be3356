"""`POST /v1/completions`: from the body, with one or several prompts, to checked requests.

`completion_reply.py` says what replies look like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, cast

import msgspec

from quire.errors import ContextLengthExceeded, InvalidRequest
from quire.serving.beam_search import BeamGeneration, Beams
from quire.serving.checks import truncate
from quire.serving.engine_protocol import EngineClient
from quire.serving.exchange import Exchange
from quire.serving.generation import generate
from quire.serving.limits import PROMPTS, check_prompts
from quire.serving.openai.beams import read_beams, refuse_render, turn_params
from quire.serving.openai.completion_reply import (
    CompletionReply,
    stream_frames,
    whole_reply,
)
from quire.serving.openai.reply import ReplyHead, include_usage, usage_each
from quire.serving.openai.sampling import build_params, check_common
from quire.serving.openai.schema import COMPLETION_UNSUPPORTED, CompletionRequest
from quire.serving.openai.structured import constraint_names
from quire.serving.prompts import check_ids, encode_all, off_loop
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
    beams: Beams | None


async def completions(exchange: Exchange) -> None:
    """Continue one or more texts.

    Raises:
        RequestError: the request is invalid; nothing has been sent yet.
    """
    request = await exchange.record(CompletionRequest, COMPLETION_UNSUPPORTED)
    served = exchange.admit(request.model)
    asked = await _prepare(exchange, served, request)
    await exchange.while_connected(_answer(exchange, served.engine, asked))


async def render_completion_request(exchange: Exchange) -> None:
    """Give texts as `/inference/v1/generate` takes them, one request each, and compute nothing.

    Raises:
        RequestError: the request is invalid.
    """
    request = await exchange.record(CompletionRequest, COMPLETION_UNSUPPORTED)
    served = exchange.state.model_for(request.model)
    refuse_render(request)
    asked = await _prepare(exchange, served, request)
    found = rendered(asked.submission, served, bool(request.stream))
    await exchange.reply(msgspec.json.encode(found))


async def _prepare(
    exchange: Exchange, served: ServedModel, request: CompletionRequest
) -> _Completion:
    engine = served.engine
    require_runner(engine, "generate")
    priority = exchange.priority(request.priority, engine.config.scheduler.scheduling_policy)
    check_common(request)
    if exchange.config.enable_force_include_usage:
        include_usage(request)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest(
            f"best_of is not supported: leave it out or set it to n ({request.n or 1}), "
            f"got {request.best_of}.",
            param="best_of",
        )
    max_tokens = _max_tokens(request)
    beams = read_beams(request, engine.config.model.max_logprobs)
    prompts = _prompts(request)
    if isinstance(prompts[0], list) and request.truncate_prompt_tokens is None:
        _check_lengths(engine, prompts)
    params = build_params(
        request,
        engine.default_params,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=_prompt_logprobs(request),
        model=engine.config.model,
        prompts=len(prompts),
        most=exchange.state.config.max_n_sequences,
    )
    params = served.parsers.mark_thinking(params)
    room = engine.max_model_len - max_tokens
    ids = [truncate(found, request, room) for found in await _encode(engine, prompts, request)]
    params = served.parsers.in_prompts(params, ids, engine.tokenizer)
    turns = turn_params(params, beams)
    check_prompts([len(i) for i in ids], turns.n, params.prompt_logprobs, engine.vocab_size)
    request_id = f"cmpl-{request.request_id or exchange.request_id}"
    submission = Submission(
        [f"{request_id}-{i}" for i in range(len(ids))],
        ids,
        params,
        priority,
        request.cache_salt,
        exchange.client(request.user),
        exchange.trace_headers(),
        exchange.deadline,
        constraint_names(request),
    )
    head = ReplyHead(
        request_id, "text_completion", served.name, served.fingerprint, exchange.created
    )
    tokens = params.num_logprobs is not None or request.return_token_ids or usage_each(request)
    texts = TokenTexts(engine.tokenizer, bool(request.return_tokens_as_token_ids))
    echoes = await _echoes(engine, request, prompts, ids)
    return _Completion(
        submission,
        TurnReader(turns, tokens=bool(tokens), prompt_only=request.max_tokens == 0),
        CompletionReply(request, head, texts, echoes, shows_tokens=bool(tokens)),
        beams,
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
    kinds = set(map(type, prompt))
    if not prompt or len(kinds) > 1:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such "
            f"lists, got {'an empty' if not prompt else 'a mixed'} list.",
            param="prompt",
        )
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    PROMPTS.check(len(prompt), "prompt")
    return cast("list[str] | list[list[int]]", prompt)


def _check_lengths(engine: EngineClient, prompts: list[str] | list[list[int]]) -> None:
    """Refuse ids that do not fit the context, before anybody looks at each of them."""
    longest = max(len(prompt) for prompt in prompts if isinstance(prompt, list))
    if longest >= engine.max_model_len:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {engine.max_model_len} tokens, prompt and "
            f"output together, but the prompt alone has {longest}. Shorten the prompt.",
            param="prompt",
        )


async def _encode(
    engine: EngineClient, prompts: list[str] | list[list[int]], request: CompletionRequest
) -> list[list[int]]:
    """Token ids of each prompt."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        cut = request.truncate_prompt_tokens is not None
        return await encode_all(engine, texts, request.add_special_tokens is not False, cut=cut)
    given = [prompt for prompt in prompts if isinstance(prompt, list)]
    for ids in given:
        check_ids(ids, engine.vocab_size, "prompt")
    return given


async def _echoes(
    engine: EngineClient,
    request: CompletionRequest,
    prompts: list[str] | list[list[int]],
    ids: list[list[int]],
) -> list[str]:
    """What `echo` puts before the output of each prompt."""
    if not request.echo:
        return [""] * len(ids)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts and request.truncate_prompt_tokens is None:
        return texts
    skip = request.skip_special_tokens is not False

    def work() -> list[str]:
        return [engine.tokenizer.decode(cut, skip_special_tokens=skip) for cut in ids]

    return await off_loop(sum(map(len, ids)), work)


async def _answer(exchange: Exchange, engine: EngineClient, asked: _Completion) -> None:
    if asked.beams is not None:
        found = BeamGeneration(exchange.state, engine, asked.submission, asked.reader, asked.beams)
        return await exchange.reply(await whole_reply(asked.reply, found))
    async with generate(exchange, engine, asked.submission, asked.reader) as generation:
        if asked.reply.request.stream:
            await send_stream(exchange, stream_frames(asked.reply, generation))
        else:
            await exchange.reply(await whole_reply(asked.reply, generation))
