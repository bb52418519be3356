"""`AsyncLLM` over a core that computes nothing: every completion ends at once with one token.

Gate, journal, queues, output processor and streams are the real ones; what was sent to the core is
kept.
"""

from __future__ import annotations

import asyncio
from typing import Any

from quire.config import EngineConfig
from quire.core.output import EngineCoreOutput
from quire.engine.async_llm import AsyncLLM
from quire.engine.messages import AddRequests, EngineCoreRequest, Outputs
from quire.outputs import FinishReason


class SilentCore:
    """In the place of the core's process."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.sent: list[EngineCoreRequest] = []
        self._engine = engine

    def send(self, message: Any) -> None:
        if isinstance(message, AddRequests):
            self.sent += message.requests
            asyncio.get_running_loop().call_soon(self._end, message.requests)

    def _end(self, requests: list[EngineCoreRequest]) -> None:
        outputs = [
            EngineCoreOutput(r.request_id, [5], finish_reason=FinishReason.LENGTH) for r in requests
        ]
        self._engine._on_message(Outputs(0, outputs))


def silent_engine(**options: Any) -> tuple[AsyncLLM, SilentCore]:
    """An engine that is ready, and its core."""
    engine = AsyncLLM(EngineConfig.from_options(**options), entropy=b"fixed")
    core = SilentCore(engine)
    engine._core = core  # type: ignore[assignment]
    engine.state = "ready"
    return engine, core
