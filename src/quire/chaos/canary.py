"""A bystander: a client that asks the same greedy request again and again while others attack."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from quire.chaos.target import HttpTarget, ask

PROMPT = "The capital of France is"


@dataclass
class Canary:
    """What it asks, what the answer is, and what became of it.

    Args:
        target: The server.
        answer: Of a run without faults.
        usual: Seconds that the answer took then.
    """

    target: HttpTarget
    answer: str
    usual: float
    asked: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: int = 0
    """Refusals that said when to come back; under overload, that is no fault."""
    slowest: float = 0.0

    async def during(self, attack: Awaitable[Any]) -> Any:
        """Keep asking while something is done to the server; returns what that returns."""
        enough = asyncio.Event()

        async def watch() -> None:
            while not enough.is_set() or not self.asked:
                await self.ask()
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        try:
            return await attack
        finally:
            enough.set()
            await watching

    async def ask(self) -> None:
        """Once."""
        start = time.monotonic()
        reply = await ask(self.target, request(self.target))
        self.asked += 1
        self.slowest = max(self.slowest, time.monotonic() - start)
        if reply.status in (429, 503) and "retry-after" in reply.headers:
            self.refused += 1
        elif not reply.is_answer:
            self.wrong.append(f"no answer: status {reply.status}, {reply.text[:120]!r}")
        elif reply.text != self.answer:
            self.wrong.append(f"another answer: {reply.text[:120]!r}")


def request(target: HttpTarget) -> dict[str, Any]:
    """What the canary asks."""
    return target.ask_for_text(PROMPT, max_tokens=24, temperature=0, stream=True)
