"""Responses that are made while nobody waits for them.

Knows neither how a request is checked nor what a reply looks like.
"""

from __future__ import annotations

import asyncio

from quire.serving.exchange import Exchange
from quire.serving.generation import generate
from quire.serving.responses.event_log import EventLog
from quire.serving.responses.keeping import BackgroundResponse, encode, keep_response, owner
from quire.serving.responses.request import PreparedResponse
from quire.serving.responses.response_reply import ResponseWriter, quiet, write_whole
from quire.serving.streaming import send_stream, told_error


async def begin_in_background(exchange: Exchange, prepared: PreparedResponse, stream: bool) -> None:
    """Reply as soon as the engine has taken the request; with `stream`, by the events as they come,
    which go on when the client disconnects."""
    log = EventLog() if stream else None
    writer = ResponseWriter(prepared.reply, quiet if log is None else log.emit)
    writer.status = "queued"
    accepted: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    running = BackgroundResponse(writer, encode(prepared.conversation.items), log)
    store, name = exchange.state.responses, prepared.reply.id
    store.pin(owner(exchange), name, running)
    running.task = asyncio.create_task(_run(exchange, prepared, running, accepted))
    exchange.goes_on_in(running.task)
    try:
        body = await accepted
    except BaseException:
        store.remove(owner(exchange), name)
        raise
    if log is None:
        await exchange.reply(body)
    else:
        await exchange.unless_disconnected(send_stream(exchange, log.read(0)))


async def _run(
    exchange: Exchange,
    prepared: PreparedResponse,
    running: BackgroundResponse,
    accepted: asyncio.Future[bytes],
) -> None:
    """Make a response that nobody waits for; a drain does."""
    state, writer, emit = exchange.state, running.writer, quiet
    if running.log is not None:
        emit = running.log.emit
    state.answering += 1
    try:
        async with generate(
            exchange, prepared.served.engine, prepared.submission, prepared.reader
        ) as generation:
            accepted.set_result(encode(writer.body()))
            for name in ("created", "queued"):
                emit(f"response.{name}", response=writer.body())
            writer.status = "in_progress"
            emit("response.in_progress", response=writer.body())
            await write_whole(writer, generation)
    except asyncio.CancelledError as error:
        exchange.failed(error)
        if not accepted.done():  # whoever waits for that would wait forever
            accepted.cancel()
            return
        writer.stop("cancelled")
    except Exception as error:
        exchange.failed(error)
        if not accepted.done():
            accepted.set_exception(error)
            return
        writer.stop("failed", told_error(error, exchange.request_id))
    finally:
        state.answering -= 1
    # No reader has its turn before the response is kept, so whoever has read the last event can
    # retrieve the response and continue it.
    emit(f"response.{writer.status}", response=writer.body())
    events = None if running.log is None else running.log.joined()
    keep_response(exchange, prepared.conversation.kept(writer, events), writer.reply.id)
    if running.log is not None:
        running.log.end()
