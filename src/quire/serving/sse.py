"""Server-sent events: framing, and a stream that ends properly whatever happens.

Knows nothing of what is in the frames.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import msgspec

from quire.errors import QuireError
from quire.logger import get_logger
from quire.serving.errors import InternalError, envelope
from quire.serving.exchange import Exchange

logger = get_logger(__name__)

DONE: Final = b"data: [DONE]\n\n"


def frame(value: Any) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def send_stream(exchange: Exchange, frames: AsyncGenerator[bytes]) -> None:
    """Send frames, then `[DONE]`. An error becomes an event, because the status is long sent."""
    await exchange.start_stream()
    last = DONE
    async with aclosing(frames):
        try:
            async for chunk in frames:
                await exchange.write(chunk)
        except QuireError as error:
            last = frame(envelope(error)) + DONE
        except Exception:
            error_id = uuid.uuid4().hex[:12]
            logger.exception("stream %s failed, error id %s", exchange.request_id, error_id)
            last = frame(envelope(InternalError(error_id))) + DONE
        await exchange.end_stream(last)
