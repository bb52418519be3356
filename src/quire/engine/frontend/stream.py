"""The outputs of one request on their way from the engine to its caller.

A stream holds as many outputs as its caller has not read: a slow reader never holds up the engine
or another caller. Knows no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.engine.frontend.checked import CheckedParams
from quire.errors import QuireError
from quire.outputs import RequestOutput


class RequestStream:
    """The outputs of one request, as an async iterator. Closing it early aborts the request."""

    def __init__(
        self,
        request_id: str,
        seed: int,
        checked: CheckedParams,
        abort: Callable[[str], None],
    ) -> None:
        self.request_id = request_id
        self.seed = seed
        """Seed in force; repeating the request with it gives the same tokens."""
        self.checked = checked
        """Its parameters, to submit further prompts with."""
        self._abort = abort
        self._queue: asyncio.Queue[RequestOutput | QuireError] = asyncio.Queue()
        self._done = False

    def put(self, item: RequestOutput | QuireError) -> None:
        """Add an output, or the error that ends the stream. Called by the engine."""
        self._queue.put_nowait(item)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._done:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, QuireError):
            self._done = True
            raise item
        self._done = item.finished
        return item

    async def aclose(self) -> None:
        """End the request if it has not ended."""
        if not self._done:
            self._done = True
            self._abort(self.request_id)
