"""`POST /v1/completions`, whole and streamed: several prompts, `echo`, the old logprobs format."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import msgspec

from quire.errors import InvalidRequest
from quire.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from quire.serving.checks import truncate
from quire.serving.engine_protocol import EngineClient
from quire.serving.exchange import Exchange
from quire.serving.generation import Generation, generate
from quire.serving.limits import PROMPTS, check_prompts
from quire.serving.openai.logprobs import (
    TextLogprobs,
    join,
    num_scored,
    prompt_logprobs,
)
from quire.serving.openai.reply import Chunks, ReplyHead, Usage
from quire.serving.openai.sampling import build_params, check_common
from quire.serving.openai.schema import COMPLETION_UNSUPPORTED, CompletionRequest
from quire.serving.prompts import check_ids, encode_all, off_loop
from quire.serving.server_state import ServedModel, require_runner
from quire.serving.sse import send_stream
from quire.serving.submission import Submission
from quire.serving.token_texts import TokenTexts

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default on this endpoint."""


@dataclass(slots=True)
class _Choice:
    """What has been sent of one choice."""

    logprobs: TextLogprobs
    started: bool = False


@dataclass(frozen=True, slots=True)
class _Completion:
    """A checked request and how its reply looks."""

    request: CompletionRequest
    submission: Submission
    head: ReplyHead
    texts: TokenTexts
    echoes: list[str]
    """With `echo`: the text of each prompt."""
    n: int
    choices: dict[int, _Choice] = field(default_factory=dict)
    scores: dict[int, msgspec.Raw] = field(default_factory=dict)
    """The `prompt_logprobs` of each prompt as JSON: all its choices carry them."""
    echoed: dict[int, TextLogprobs] = field(default_factory=dict)
    """The echoed `logprobs` of each prompt, with which all its choices begin."""

    @property
    def prompt_only(self) -> bool:
        """`max_tokens` 0 with `echo`: one token is computed and dropped."""
        return self.request.max_tokens == 0

    def choice(self, index: int) -> _Choice:
        """State of a choice, made on first use."""
        if index not in self.choices:
            self.choices[index] = _Choice(TextLogprobs(self.texts))
        return self.choices[index]

    def prompt_scores(self, prompt_index: int, output: RequestOutput) -> msgspec.Raw:
        """`prompt_logprobs` of a prompt that was scored, made once for all choices."""
        if prompt_index not in self.scores:
            positions = prompt_logprobs(output.prompt_logprobs or [])
            self.scores[prompt_index] = msgspec.Raw(msgspec.json.encode(positions))
        return self.scores[prompt_index]

    def echoed_logprobs(
        self, prompt_index: int, output: RequestOutput, own: TextLogprobs
    ) -> dict[str, list[Any]]:
        """`logprobs` of an echoed prompt, made once for all choices; `own` goes on after it."""
        if prompt_index not in self.echoed:
            made = self.echoed[prompt_index] = TextLogprobs(self.texts)
            made.piece(output.prompt_token_ids, output.prompt_logprobs or [])
        return own.follow(self.echoed[prompt_index])


async def completions(exchange: Exchange) -> None:
    """Continue one or more texts.

    Raises:
        RequestError: the request is invalid; nothing has been sent yet.
    """
    request = await exchange.record(CompletionRequest, COMPLETION_UNSUPPORTED)
    served = exchange.state.model_for(request.model)
    completion = await _prepare(exchange, served, request)
    await exchange.while_connected(_answer(exchange, served.engine, completion))


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
    )
    head = ReplyHead(request_id, "text_completion", served.name, served.fingerprint)
    texts = TokenTexts(engine.tokenizer, bool(request.return_tokens_as_token_ids))
    echoes = [_echo(engine, request, prompts[i], cut) for i, cut in enumerate(ids)]
    return _Completion(request, submission, head, texts, echoes, params.n)


def _max_tokens(request: CompletionRequest) -> int:
    if request.max_tokens is None:
        return DEFAULT_MAX_TOKENS
    return 1 if request.max_tokens == 0 and request.echo else request.max_tokens


def _prompt_logprobs(request: CompletionRequest) -> int | None:
    """Echoed logprobs need those of the prompt, and at least as many as the output's."""
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


async def _answer(exchange: Exchange, engine: EngineClient, completion: _Completion) -> None:
    async with generate(exchange.state, engine, completion.submission) as generation:
        if completion.request.stream:
            await send_stream(exchange, _frames(completion, generation))
        else:
            await exchange.reply(await _whole(completion, generation))


async def _whole(completion: _Completion, generation: Generation) -> bytes:
    """The reply in one piece, choices in the order of the prompts."""
    usage, finals = Usage(), dict[int, RequestOutput]()
    async for prompt_index, output in generation.outputs():
        finals[prompt_index] = output

    def work() -> bytes:
        choices = []
        for prompt_index, output in sorted(finals.items()):
            _drop_output(completion, output)
            usage.add(prompt_index, output)
            choices += [_piece(completion, prompt_index, output, c) for c in output.outputs]
        reply = completion.head.to_dict() | {
            "choices": choices,
            "usage": usage.to_dict(),
            "seed": generation.seed,
        }
        return msgspec.json.encode(reply)

    return await off_loop(sum(map(num_scored, finals.values())), work)


def _drop_output(completion: _Completion, output: RequestOutput) -> None:
    """Forget the one token that had to be computed when only the prompt was wanted."""
    if not completion.prompt_only:
        return
    for c in output.outputs:
        c.text, c.token_ids, c.stop_reason = "", [], None
        c.logprobs = None if c.logprobs is None else []
        c.finish_reason = c.finish_reason and "length"


def _piece(
    completion: _Completion, prompt_index: int, output: RequestOutput, c: CompletionOutput
) -> dict[str, Any]:
    """A whole choice, or the next piece of one: the first begins with the echoed prompt."""
    index = prompt_index * completion.n + c.index
    choice = completion.choice(index)
    first, choice.started = not choice.started, True
    piece = {
        "index": index,
        "text": (completion.echoes[prompt_index] if first else "") + c.text,
        "logprobs": _logprobs(completion, prompt_index, output, c, first),
        "finish_reason": c.finish_reason,
        "stop_reason": c.stop_reason,
    }
    if completion.request.return_token_ids:
        piece["token_ids"] = c.token_ids
        if first:
            piece["prompt_token_ids"] = output.prompt_token_ids
    if first and completion.request.prompt_logprobs is not None and output.prompt_logprobs:
        piece["prompt_logprobs"] = completion.prompt_scores(prompt_index, output)
    return piece


def _logprobs(
    completion: _Completion,
    prompt_index: int,
    output: RequestOutput,
    c: CompletionOutput,
    first: bool,
) -> dict[str, list[Any]] | None:
    if completion.request.logprobs is None:
        return None
    own = completion.choice(prompt_index * completion.n + c.index).logprobs
    pieces = []
    if first and completion.request.echo and output.prompt_logprobs is not None:
        pieces.append(completion.echoed_logprobs(prompt_index, output, own))
    positions: list[PositionLogprobs] = c.logprobs or []
    pieces.append(own.piece(c.token_ids, positions))
    return join(pieces)


async def _frames(completion: _Completion, generation: Generation) -> AsyncGenerator[bytes]:
    """Chunks of all choices as they come, then the usage chunk."""
    request = completion.request
    chunks = Chunks(completion.head, request, b'"text":', b"")
    plain = request.logprobs is None and not request.return_token_ids and not chunks.usage_each
    usage, extra = Usage(), {"seed": generation.seed}
    async for prompt_index, output in generation.outputs():
        _drop_output(completion, output)
        usage.add(prompt_index, output)
        frames = []
        for c in output.outputs:
            index = prompt_index * completion.n + c.index
            started = completion.choice(index).started
            if plain and started and c.finish_reason is None:
                if c.text:
                    frames.append(chunks.text(index, c.text))
                continue
            piece = _piece(completion, prompt_index, output, c)
            frames.append(chunks.full(piece, usage, extra))
            extra = {}
        if frames:
            yield b"".join(frames)
    if chunks.usage_last:
        yield chunks.usage(usage)
