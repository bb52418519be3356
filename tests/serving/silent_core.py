"""`AsyncLLM` over a core that computes nothing: every completion ends at once with one token.

Gate, journal, queues, output processor and streams are the real ones; what was sent to the core is
kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from quire.config import EngineConfig
from quire.core.output import EngineCoreOutput
from quire.engine.async_llm import AsyncLLM
from quire.engine.cores.handle import OnExit, OnMessage
from quire.engine.messages import AddRequests, EngineCoreRequest, Outputs
from quire.outputs import FinishReason


class SilentCore:
    """A `CoreHandle` with nothing behind it."""

    def __init__(self, epoch: int, on_message: OnMessage, on_exit: OnExit) -> None:
        self.epoch = epoch
        self.sent: list[EngineCoreRequest] = []
        self._on_message = on_message
        self._number = 0

    def start(self, config: EngineConfig) -> None:
        pass

    def send(self, message: Any) -> None:
        if isinstance(message, AddRequests):
            self.sent += message.requests
            asyncio.get_running_loop().call_soon(self._end, message.requests)

    def prepare(self, message: Any) -> Callable[[], None]:
        return partial(self.send, message)

    def observe(self, closely: bool) -> None:
        pass

    def condemn(self) -> None:
        pass

    def stop(self) -> None:
        pass

    async def ended(self, grace: float = 1.0) -> None:
        pass

    def _end(self, requests: list[EngineCoreRequest]) -> None:
        outputs = [
            EngineCoreOutput(r.request_id, [5], finish_reason=FinishReason.LENGTH) for r in requests
        ]
        self._number += 1
        self._on_message(Outputs(self.epoch, self._number, outputs))


Core = TypeVar("Core", bound=SilentCore)


def silent_engine(kind: type[Core] = SilentCore, **options: Any) -> tuple[AsyncLLM, Core]:  # type: ignore[assignment]
    """An engine that is ready, and its core, of this kind."""
    made: list[Core] = []

    def make(epoch: int, on_message: OnMessage, on_exit: OnExit) -> Core:
        made.append(kind(epoch, on_message, on_exit))
        return made[-1]

    config = EngineConfig.from_options(**options)
    engine = AsyncLLM(config, entropy=b"fixed", make_core=make)
    engine.supervisor.start()
    engine.supervisor.state = "ready"
    return engine, made[-1]
