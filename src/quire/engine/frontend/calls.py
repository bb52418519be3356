"""Control verbs on their way: who waits for which `Reply` of the core."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from quire.engine.messages import Call, Reply, error_class
from quire.errors import QuireError


class PendingCalls:
    """Matches replies with the calls they answer.

    Args:
        send: Brings a message to the core.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def call(self, epoch: int, verb: str, args: dict[str, Any]) -> Any:
        """Run a verb in the core.

        Raises:
            QuireError: the verb failed, or the core died.
        """
        call_id = next(self._ids)
        future = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        self._send(Call(epoch, call_id, verb, args))
        try:
            return await future
        finally:
            self._waiting.pop(call_id, None)

    def answer(self, reply: Reply) -> None:
        """Hand a reply to whoever waits for it; nobody may."""
        future = self._waiting.get(reply.call_id)
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(error_class(reply.kind)(reply.error))
        else:
            future.set_result(reply.result)

    def fail(self, error: QuireError) -> None:
        """Nobody will answer any more."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
