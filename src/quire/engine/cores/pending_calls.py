"""Control verbs on their way to a core: which callers wait for which `Reply`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from quire.engine.messages import Call, Reply, error_class
from quire.errors import QuireError

Then = Callable[[Any], None]


class PendingCalls:
    """Matches replies with the calls they answer."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[Any], Then | None]] = {}

    def make(
        self, epoch: int, verb: str, args: dict[str, Any], then: Then | None = None
    ) -> tuple[Call, asyncio.Future[Any]]:
        """A call to send, and what will hold its result or the `QuireError` it ended with.

        Args:
            epoch: Of the core that it goes to.
            verb, args: What is called.
            then: Gets the result when the reply comes, also if nobody waits for it any more.
        """
        call = Call(epoch, next(self._ids), verb, args)
        future = asyncio.get_running_loop().create_future()
        self._waiting[call.call_id] = future, then
        return call, future

    def answer(self, reply: Reply) -> None:
        """Hand a reply to its caller, who may have gone."""
        future, then = self._waiting.pop(reply.call_id, (None, None))
        if then is not None and reply.error is None:
            then(reply.result)
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(error_class(reply.kind)(reply.error))
        else:
            future.set_result(reply.result)

    def fail(self, error: QuireError) -> None:
        """The core will answer none of them."""
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(error)
