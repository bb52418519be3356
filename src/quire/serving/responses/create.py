"""`POST /v1/responses` and `POST /v1/responses/input_tokens`: the reply to a request, sent or made
in the background.

`request.py` checks the body, `response_reply.py` says what replies look like.
"""

from __future__ import annotations

import msgspec

from quire.serving.dialogue import render
from quire.serving.exchange import Exchange
from quire.serving.generation import generate
from quire.serving.responses.background import begin_in_background
from quire.serving.responses.keeping import encode, keep_response
from quire.serving.responses.request import (
    PreparedResponse,
    dialogue_for,
    prepare_response,
    read_conversation,
)
from quire.serving.responses.response_reply import (
    ResponseWriter,
    quiet,
    stream_response,
    write_whole,
)
from quire.serving.responses.schema import (
    INPUT_UNSUPPORTED,
    RESPONSES_UNSUPPORTED,
    InputTokensRequest,
    ResponsesRequest,
)
from quire.serving.server_state import require_runner
from quire.serving.streaming import send_stream


async def create_response(exchange: Exchange) -> None:
    """Make a response.

    Raises:
        RequestError: the request is invalid; nothing has been sent yet.
    """
    request = await exchange.record(ResponsesRequest, RESPONSES_UNSUPPORTED)
    served = exchange.admit(request.model)
    require_runner(served.engine, "generate")
    prepared = await prepare_response(exchange, served, request)
    if request.background:
        await begin_in_background(exchange, prepared, bool(request.stream))
    else:
        await exchange.while_connected(_answer(exchange, prepared, bool(request.stream)))


async def input_tokens(exchange: Exchange) -> None:
    """Count the tokens of a conversation as the model would get it.

    Raises:
        RequestError: the request is invalid.
    """
    request = await exchange.record(InputTokensRequest, INPUT_UNSUPPORTED)
    served = exchange.state.model_for(request.model)
    conversation = await read_conversation(exchange, request, "resp_")
    prompt = await render(served, dialogue_for(served, request, conversation))
    told = {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}
    await exchange.reply(msgspec.json.encode(told))


async def _answer(exchange: Exchange, prepared: PreparedResponse, stream: bool) -> None:
    def keep(writer: ResponseWriter) -> None:
        if prepared.store:
            keep_response(exchange, prepared.conversation.kept(writer), writer.reply.id)

    reply, engine = prepared.reply, prepared.served.engine
    async with generate(exchange, engine, prepared.submission, prepared.reader) as generation:
        if stream:
            frames = stream_response(reply, generation, keep, exchange.request_id)
            await send_stream(exchange, frames)
            return
        writer = ResponseWriter(reply, quiet)
        await write_whole(writer, generation)
        keep(writer)
        await exchange.reply(encode(writer.body()))
