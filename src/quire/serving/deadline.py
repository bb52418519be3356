"""The end of a client's patience: requests that have not ended by then are ended.

What has text by then is returned as it is, with finish reason `abort`. If there is nothing to
return, the client gets an error. Knows neither headers nor replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from quire.engine.frontend.checked import CheckedParams
from quire.outputs import RequestOutput
from quire.serving.engine_protocol import EngineClient, OutputStream
from quire.serving.errors import DeadlineExceeded


class Deadline:
    """When a reply must be complete.

    Args:
        milliseconds: From now.
    """

    def __init__(self, milliseconds: int) -> None:
        self.milliseconds = milliseconds
        self._at = asyncio.get_running_loop().time() + milliseconds / 1000
        self._expired = False
        self._begun = False
        self._open = 0
        # streams that have not ended
        self._ending: asyncio.Task[None] | None = None

    def left(self) -> float:
        """Seconds until then.

        Raises:
            DeadlineExceeded: it has passed.
        """
        left = self._at - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineExceeded(self.milliseconds)
        return left

    def watch(
        self, engine: EngineClient, request_ids: Sequence[str], streams: Sequence[OutputStream]
    ) -> tuple[asyncio.TimerHandle, list[OutputStream]]:
        """End requests at the deadline.

        Returns:
            The timer, to be cancelled at the end, and the streams to read instead.
        """
        self._open = len(streams)
        loop = asyncio.get_running_loop()
        timer = loop.call_at(self._at, self._expire, engine, request_ids)
        return timer, [_Watched(stream, self) for stream in streams]

    def _expire(self, engine: EngineClient, request_ids: Sequence[str]) -> None:
        self._expired = True
        self._ending = asyncio.ensure_future(_end(engine, request_ids))

    def see(self, output: RequestOutput) -> None:
        """An output is about to be passed on.

        Raises:
            DeadlineExceeded: it is empty because of the deadline, and so are all others; or it is
                that of a pooling model, which has no partial result.
        """
        self._begun |= any(completion.token_ids for completion in output.outputs)
        if not output.finished:
            return
        self._open -= 1
        if not self._expired or output.error is not None or output.pooled is not None:
            return
        aborted = [one for one in output.outputs if one.finish_reason == "abort"]
        if not output.outputs or (aborted and not self._open and not self._begun):
            raise DeadlineExceeded(self.milliseconds)


class _Watched:
    """A stream whose outputs a deadline sees."""

    def __init__(self, stream: OutputStream, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    @property
    def checked(self) -> CheckedParams:
        return self._stream.checked

    @property
    def seed(self) -> int:
        return self._stream.seed

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        async for output in self._stream:
            self._deadline.see(output)
            yield output

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _end(engine: EngineClient, request_ids: Sequence[str]) -> None:
    for request_id in request_ids:
        await engine.abort(request_id)
