"""The end of serving: what was accepted gets its reply, until the time is up.

Knows the server's state, and nothing of signals or processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from quire.errors import QuireError
from quire.logger import get_logger
from quire.serving.errors import CutShort, LeftInJournal
from quire.serving.server_state import ServerState

logger = get_logger(__name__)

WATCH_SECONDS: Final = 0.02
"""Seconds between two looks whether everything has been sent."""
FLUSH_SECONDS: Final = 0.5
"""Seconds that requests which are ended have to send their last bytes."""


async def drain(
    state: ServerState, unsent: Callable[[], bool], seconds: float, hurry: asyncio.Event
) -> None:
    """Return when every accepted request has been answered, or has been told that it will not be.

    Args:
        state: Of the server. It is unready from now on, if it is not already.
        unsent: Whether replies are still on their way to slow clients.
        seconds: That running requests have to finish.
        hurry: When this is set, their time is up.
    """
    state.begin_drain(seconds)

    def busy() -> bool:
        return bool(state.answering or state.in_flight or unsent())

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while busy() and not hurry.is_set():
                await asyncio.sleep(WATCH_SECONDS)
    await _end_rest(state)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FLUSH_SECONDS):
            while busy():
                await asyncio.sleep(WATCH_SECONDS)


async def _end_rest(state: ServerState) -> None:
    """End what is unfinished with an error that says so. What the journal on disk holds goes on
    after the restart, and its clients are told that instead."""
    state.closed = True
    if state.journal is not None:
        left = [kept for kept in state.kept.running() if state.journal.holds(kept.id)]
        # First the last write: what ends from here on has not ended for the next process.
        await asyncio.to_thread(state.journal.close)
        for kept in left:
            kept.stop(LeftInJournal(kept.id, state.seconds_until_restart()))
        if left:
            logger.info("%d request(s) are left in the journal", len(left))
            await asyncio.sleep(0)
    if state.answering:
        logger.warning("%d request(s) were not finished in time", state.answering)
    for engine in state.engines:
        for request_id in tuple(state.active_ids):
            with contextlib.suppress(QuireError):
                await engine.abort(request_id, CutShort(state.seconds_until_restart()))
