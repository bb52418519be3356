"""Streamed replies that end properly whatever happens, and get their ids if they are kept. Knows
nothing else of what is in the frames."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from quire.errors import QuireError
from quire.logger import get_logger
from quire.serving.errors import InternalError, LeftInJournal
from quire.serving.exchange import Exchange
from quire.serving.keep_alive import kept_alive
from quire.serving.kept_streams import KeptReply
from quire.serving.large_json import ONE_GO
from quire.serving.prompts import off_loop

logger = get_logger(__name__)


async def send_stream(exchange: Exchange, frames: AsyncGenerator[bytes]) -> None:
    """Send frames, then the end that the route's dialect has. An error becomes a frame, because the
    status is long sent. Every way of streaming a reply goes through here."""
    await exchange.start_stream()
    if exchange.kept is not None:
        return await _keep_stream(exchange, exchange.kept, frames)
    last = exchange.dialect.stream_end
    async with aclosing(frames):
        try:
            with kept_alive(exchange, exchange.dialect.stream_type):
                async for chunk in frames:
                    if len(chunk) > ONE_GO or not exchange.write_now(chunk):
                        await exchange.write(chunk)
        except Exception as error:
            exchange.failed(error)
            last = _error_frame(exchange, error) + last
        await exchange.end_stream(last)


async def _keep_stream(exchange: Exchange, kept: KeptReply, frames: AsyncGenerator[bytes]) -> None:
    """Write frames for whoever reads them, now or later; server-sent events get ids."""
    dialect, ids, failed = exchange.dialect, kept.ids, True
    named = dialect.stream_type.startswith(b"text/event-stream")
    last = dialect.stream_end
    try:
        async with aclosing(frames):
            async for chunk in frames:
                if len(chunk) > ONE_GO and named:
                    chunk = await off_loop(len(chunk), partial(ids.attach, chunk))
                    kept.write(chunk)
                else:
                    kept.write(ids.attach(chunk) if named else chunk)
        failed = False
    except asyncio.CancelledError:
        if kept.stopped is None:
            raise
        exchange.failed(kept.stopped)
        last = dialect.stream_error(kept.stopped, exchange.request_id) + last
        # What ends a stream only here has no id: its client goes on after the event before.
        named &= not isinstance(kept.stopped, LeftInJournal)
    except Exception as error:
        exchange.failed(error)
        last = _error_frame(exchange, error) + last
    ids.enter_end()
    exchange.settle()
    kept.end(ids.attach(last) if named else last, failed)


def _error_frame(exchange: Exchange, error: Exception) -> bytes:
    told = told_error(error, exchange.request_id)
    return exchange.dialect.stream_error(told, exchange.request_id)


def told_error(error: Exception, request_id: str) -> QuireError:
    """What the client is told of an exception within a stream. One that was not raised on purpose
    goes to the log, and the client gets an id under which it is there."""
    if isinstance(error, QuireError):
        return error
    error_id = uuid.uuid4().hex[:12]
    logger.error("stream %s failed, error id %s", request_id, error_id, exc_info=error)
    return InternalError(error_id)
