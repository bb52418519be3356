"""Streamed replies that end properly whatever happens. Knows nothing of what is in the frames."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from quire.errors import QuireError
from quire.logger import get_logger
from quire.serving.errors import InternalError
from quire.serving.exchange import Exchange
from quire.serving.keep_alive import kept_alive

logger = get_logger(__name__)


async def send_stream(exchange: Exchange, frames: AsyncGenerator[bytes]) -> None:
    """Send frames, then the end that the route's dialect has. An error becomes a frame, because the
    status is long sent."""
    dialect = exchange.dialect
    await exchange.start_stream()
    last = dialect.stream_end
    async with aclosing(frames):
        try:
            with kept_alive(exchange):
                async for chunk in frames:
                    await exchange.write(chunk)
        except QuireError as error:
            last = dialect.stream_error(error, exchange.request_id) + last
        except Exception:
            error_id = uuid.uuid4().hex[:12]
            logger.exception("stream %s failed, error id %s", exchange.request_id, error_id)
            error_frame = dialect.stream_error(InternalError(error_id), exchange.request_id)
            last = error_frame + last
        await exchange.end_stream(last)
