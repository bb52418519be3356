"""`POST /v1/chat/completions/batch`: several conversations in one request, a choice for each.

vLLM's form. Each conversation is a prompt of its own with its own random numbers; if one of them is
wrong, the request is, and nothing is computed.
"""

from __future__ import annotations

import msgspec

from quire.errors import InvalidRequest
from quire.params import SamplingParams
from quire.serving.exchange import Exchange
from quire.serving.generation import generate
from quire.serving.limits import PROMPTS, check_prompts
from quire.serving.openai.chat_fields import read_conversation, read_fields
from quire.serving.openai.chat_reply import ChatReply, whole_reply
from quire.serving.openai.reply import ReplyHead
from quire.serving.openai.schema import BATCH_CHAT_UNSUPPORTED, BatchChatRequest, ChatRequest
from quire.serving.server_state import ServedModel
from quire.serving.submission import Submission
from quire.serving.token_texts import TokenTexts
from quire.serving.turn_reader import TurnReader


async def batch_chat_completions(exchange: Exchange) -> None:
    """Answer several conversations.

    Raises:
        RequestError: the request is invalid; nothing has been sent yet.
    """
    given = msgspec.structs.asdict(await exchange.record(BatchChatRequest, BATCH_CHAT_UNSUPPORTED))
    conversations = given.pop("messages")
    if not conversations:
        raise InvalidRequest("messages must hold at least one conversation.", param="messages")
    PROMPTS.check(len(conversations), "messages")
    for i, messages in enumerate(conversations):
        if not messages:
            raise InvalidRequest(f"messages[{i}] must not be empty.", param=f"messages[{i}]")
    requests = [ChatRequest(messages=messages, **given) for messages in conversations]
    served = exchange.admit(requests[0].model)
    submission, reader, reply = await _prepare(exchange, served, requests)

    async def answer() -> None:
        async with generate(exchange, served.engine, submission, reader) as generation:
            await exchange.reply(await whole_reply(reply, generation))

    await exchange.while_connected(answer())


async def _prepare(
    exchange: Exchange, served: ServedModel, requests: list[ChatRequest]
) -> tuple[Submission, TurnReader, ChatReply]:
    engine, request = served.engine, requests[0]
    fields = read_fields(exchange, served, request, len(requests))
    found = [
        await read_conversation(served, one, fields, f"messages[{i}]")
        for i, one in enumerate(requests)
    ]
    ids = [one.ids for one in found]
    check_prompts([len(i) for i in ids], 1, None, engine.vocab_size, "messages")
    request_id = f"chatcmpl-{request.request_id or exchange.request_id}"
    submission = Submission(
        [f"{request_id}_{i}" for i in range(len(ids))],
        ids,
        _shared([one.params for one in found]),
        fields.priority,
        request.cache_salt,
        exchange.client(request.user),
        exchange.trace_headers(),
        exchange.deadline,
        fields.names,
    )
    head = ReplyHead(
        request_id, "chat.completion", served.name, served.fingerprint, exchange.created
    )
    texts = TokenTexts(engine.tokenizer, bool(request.return_tokens_as_token_ids))
    parsing = [one.parsing for one in found]
    reader = TurnReader(fields.params, tokens=fields.shows_tokens, parsing=parsing)
    return submission, reader, ChatReply(request, head, texts, [one.echoed for one in found])


def _shared(params: list[SamplingParams]) -> SamplingParams | list[SamplingParams]:
    """One for all, which is checked once, unless conversations differ in where their forms
    begin."""
    return params[0] if all(one == params[0] for one in params) else params
