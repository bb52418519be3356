"""`POST /v1/chat/completions`: from the body to a checked request, and its reply sent.

`chat_reply.py` says what replies look like.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.serving.beam_search import BeamGeneration, Beams
from quire.serving.engine_protocol import EngineClient
from quire.serving.exchange import Exchange
from quire.serving.generation import generate
from quire.serving.limits import check_prompts
from quire.serving.openai.beams import (
    check_parsing,
    read_beams,
    refuse_render,
    turn_params,
)
from quire.serving.openai.chat_fields import read_conversation, read_fields
from quire.serving.openai.chat_reply import ChatReply, stream_frames, whole_reply
from quire.serving.openai.reply import ReplyHead, include_usage
from quire.serving.openai.schema import CHAT_UNSUPPORTED, ChatRequest
from quire.serving.rendered import rendered
from quire.serving.server_state import ServedModel
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
    if exchange.config.enable_force_include_usage:
        include_usage(request)
    beams = read_beams(request, engine.config.model.max_logprobs)
    fields = read_fields(exchange, served, request)
    found = await read_conversation(served, request, fields)
    params = found.params
    n = params.n if beams is None else beams.width
    check_prompts([len(found.ids)], n, params.prompt_logprobs, engine.vocab_size, "messages")
    check_parsing(params, beams)
    request_id = f"chatcmpl-{request.request_id or exchange.request_id}"
    head = ReplyHead(
        request_id, "chat.completion.chunk", served.name, served.fingerprint, exchange.created
    )
    submission = Submission(
        [request_id],
        [found.ids],
        params,
        fields.priority,
        request.cache_salt,
        exchange.client(request.user),
        exchange.trace_headers(),
        exchange.deadline,
        fields.names,
    )
    turns, tokens = turn_params(params, beams), fields.shows_tokens
    texts = TokenTexts(engine.tokenizer, bool(request.return_tokens_as_token_ids))
    return _Chat(
        submission,
        TurnReader(turns, tokens=tokens, parsing=found.parsing),
        ChatReply(request, head, texts, [found.echoed]),
        beams,
    )


async def _answer(exchange: Exchange, engine: EngineClient, chat: _Chat) -> None:
    if chat.beams is not None:
        found = BeamGeneration(exchange.state, engine, chat.submission, chat.reader, chat.beams)
        return await exchange.reply(await whole_reply(chat.reply, found))
    async with generate(exchange, engine, chat.submission, chat.reader) as generation:
        if chat.reply.request.stream:
            await send_stream(exchange, stream_frames(chat.reply, generation))
        else:
            await exchange.reply(await whole_reply(chat.reply, generation))
