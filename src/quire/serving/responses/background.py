"""Responses that are made while nobody waits for them.

Knows neither how a request is checked nor what a reply looks like.
"""

from __future__ import annotations

import asyncio

from quire.serving.exchange import Exchange
from quire.serving.generation import generate
from quire.serving.responses.keeping import BackgroundResponse, encode, keep_response, owner
from quire.serving.responses.request import PreparedResponse
from quire.serving.responses.response_reply import ResponseWriter, quiet, write_whole
from quire.serving.streaming import told_error


async def begin_in_background(exchange: Exchange, prepared: PreparedResponse) -> None:
    """Reply as soon as the engine has taken the request."""
    writer = ResponseWriter(prepared.reply, quiet)
    writer.status = "queued"
    accepted: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    running = BackgroundResponse(writer, encode(prepared.conversation.items))
    store, name = exchange.state.responses, prepared.reply.id
    store.pin(owner(exchange), name, running)
    running.task = asyncio.create_task(_run(exchange, prepared, writer, accepted))
    try:
        body = await accepted
    except Exception:
        store.remove(owner(exchange), name)
        raise
    await exchange.reply(body)


async def _run(
    exchange: Exchange,
    prepared: PreparedResponse,
    writer: ResponseWriter,
    accepted: asyncio.Future[bytes],
) -> None:
    """Make a response that nobody waits for; a drain does."""
    state = exchange.state
    state.answering += 1
    try:
        async with generate(
            exchange, prepared.served.engine, prepared.submission, prepared.reader
        ) as generation:
            accepted.set_result(encode(writer.body()))
            writer.status = "in_progress"
            await write_whole(writer, generation)
    except asyncio.CancelledError:
        writer.stop("cancelled")
    except Exception as error:
        if not accepted.done():
            accepted.set_exception(error)
            return
        writer.stop("failed", told_error(error, exchange.request_id))
    finally:
        state.answering -= 1
    keep_response(exchange, prepared.conversation.kept(writer), writer.reply.id)
