"""`POST /v1/chat/completions`: from the body to a checked request, and its reply sent.

`chat_reply.py` says what replies look like.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.bounds import read_field
from quire.errors import InvalidRequest
from quire.serving.beam_search import BeamGeneration, Beams
from quire.serving.checks import truncate
from quire.serving.conversation import read_tools, render_chat
from quire.serving.engine_protocol import EngineClient
from quire.serving.exchange import Exchange
from quire.serving.forced_calls import call_names
from quire.serving.generation import generate
from quire.serving.limits import check_prompts
from quire.serving.openai.beams import (
    check_parsing,
    read_beams,
    refuse_render,
    turn_params,
)
from quire.serving.openai.chat_reply import ChatReply, stream_frames, whole_reply
from quire.serving.openai.reply import ReplyHead, include_usage, usage_each
from quire.serving.openai.sampling import build_params, check_common
from quire.serving.openai.schema import CHAT_UNSUPPORTED, ChatRequest
from quire.serving.openai.structured import constraint_names
from quire.serving.prompts import encode
from quire.serving.rendered import rendered
from quire.serving.server_state import ServedModel, require_runner
from quire.serving.streaming import send_stream
from quire.serving.submission import Submission
from quire.serving.token_texts import TokenTexts
from quire.serving.turn_reader import TurnReader


@dataclass(frozen=True, slots=True)
class _Chat:
    """A checked request: what to submit, how to parse the output, and how to format the reply."""

    submission: Submission
    reader: TurnReader
    reply: ChatReply
    beams: Beams | None


async def chat_completions(exchange: Exchange) -> None:
    """Answer one conversation.

    Raises:
        RequestError: the request is invalid; nothing has been sent yet.
    """
    request = await exchange.record(ChatRequest, CHAT_UNSUPPORTED)
    served = exchange.admit(request.model)
    chat = await _prepare(exchange, served, request)
    await exchange.while_connected(_answer(exchange, served.engine, chat))


async def render_chat_request(exchange: Exchange) -> None:
    """Give a conversation as `/inference/v1/generate` takes it, and compute nothing.

    Raises:
        RequestError: the request is invalid.
    """
    request = await exchange.record(ChatRequest, CHAT_UNSUPPORTED)
    served = exchange.state.model_for(request.model)
    refuse_render(request)
    chat = await _prepare(exchange, served, request)
    (one,) = rendered(chat.submission, served, bool(request.stream))
    await exchange.reply(msgspec.json.encode(one))


async def _prepare(exchange: Exchange, served: ServedModel, request: ChatRequest) -> _Chat:
    engine = served.engine
    require_runner(engine, "generate")
    priority = exchange.priority(request.priority, engine.config.scheduler.scheduling_policy)
    check_common(request)
    if exchange.config.enable_force_include_usage:
        include_usage(request)
    max_tokens = _max_tokens(request)
    logprobs = _logprobs(request, engine.config.model.max_logprobs)
    beams = read_beams(request, engine.config.model.max_logprobs)
    tools = read_tools(
        request.tools, request.tool_choice, parallel=request.parallel_tool_calls is not False
    )
    served.parsers.check_tools(tools)
    variables = served.parsers.variables(request.reasoning_effort, request.chat_template_kwargs)
    params = build_params(
        request,
        engine.default_params,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        most=exchange.state.config.max_n_sequences,
        model=engine.config.model,
    )
    if request.documents is not None:
        variables = {"documents": request.documents, **variables}
    prompt = await render_chat(
        engine,
        request.messages,
        tools.for_template(),
        request.add_generation_prompt,
        request.continue_final_message,
        variables,
    )
    cut = request.truncate_prompt_tokens is not None
    ids = await encode(engine, prompt, bool(request.add_special_tokens), cut=cut)
    ids = truncate(ids, request, engine.max_model_len - (max_tokens or 1))
    n = params.n if beams is None else beams.width
    check_prompts([len(ids)], n, params.prompt_logprobs, engine.vocab_size, "messages")
    parsing, params = served.parsers.parsing(
        prompt,
        tools,
        params,
        engine.tokenizer,
        reasoning=request.include_reasoning is not False,
        may_reason=not request.continue_final_message and served.parsers.may_reason(variables),
    )
    check_parsing(params, beams)
    request_id = f"chatcmpl-{request.request_id or exchange.request_id}"
    head = ReplyHead(
        request_id, "chat.completion.chunk", served.name, served.fingerprint, exchange.created
    )
    submission = Submission(
        [request_id],
        [ids],
        params,
        priority,
        request.cache_salt,
        exchange.client(request.user),
        exchange.trace_headers(),
        exchange.deadline,
        call_names(tools) if tools.constrains else constraint_names(request),
    )
    tokens = bool(
        params.num_logprobs is not None or request.return_token_ids or usage_each(request)
    )
    texts = TokenTexts(engine.tokenizer, bool(request.return_tokens_as_token_ids))
    return _Chat(
        submission,
        TurnReader(turn_params(params, beams), tokens=tokens, parsing=parsing),
        ChatReply(request, head, texts, _echoed(request)),
        beams,
    )


def _max_tokens(request: ChatRequest) -> int | None:
    """The limit under its newer or older name; without either, up to the context length."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens ({old}) and max_completion_tokens ({new}) are two names of one limit: "
            "give one of them.",
            param="max_tokens",
        )
    if new is not None:
        read_field("max_completion_tokens", new)
    return old if new is None else new


def _logprobs(request: ChatRequest, limit: int) -> int | None:
    """How many candidates to ask for, which chat requests say in two fields."""
    if not request.logprobs:
        if request.top_logprobs:  # 0 asks for nothing
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        return None
    top: int = read_field("top_logprobs", request.top_logprobs or 0)
    if top > limit >= 0:
        raise InvalidRequest(
            f"top_logprobs must be at most {limit} (--max-logprobs), got {top}.",
            param="top_logprobs",
        )
    return top


def _echoed(request: ChatRequest) -> str:
    last = request.messages[-1]
    if not request.echo or last.role != "assistant":
        return ""
    return last.content if isinstance(last.content, str) else ""


async def _answer(exchange: Exchange, engine: EngineClient, chat: _Chat) -> None:
    if chat.beams is not None:
        found = BeamGeneration(exchange.state, engine, chat.submission, chat.reader, chat.beams)
        return await exchange.reply(await whole_reply(chat.reply, found))
    async with generate(exchange, engine, chat.submission, chat.reader) as generation:
        if chat.reply.request.stream:
            await send_stream(exchange, stream_frames(chat.reply, generation))
        else:
            await exchange.reply(await whole_reply(chat.reply, generation))
