"""Requests with logits processors go on with the same bytes after the engine core was killed:
what a processor holds is rebuilt from the tokens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx

from live_server import Server, serving
from patience import PATIENCE

SUPPORT = str(Path(__file__).parent.parent / "support")
NAMES = [f"toy_processors:{name}" for name in ("OnlyToken", "Counting", "Sharper", "Wrapped")]
ASKS: list[dict[str, Any]] = [
    {"temperature": 0, "vllm_xargs": {"count": True}},
    {"temperature": 1, "seed": 3, "vllm_xargs": {"count": True, "sharpen": 4}},
    {"temperature": 1, "seed": 4, "vllm_xargs": {"ban": [5], "sharpen": 3}, "n": 2},
    {"temperature": 1, "seed": 5, "vllm_xargs": {"target_token": 300, "after": 250}},
    {"temperature": 1, "seed": 6, "logprob_token_ids": [5, 300], "stream_interval": 7},
]


async def told(server: Server, kill_after: int | None) -> list[Any]:
    """What each stream says in all; the core is killed once so many events have come."""
    events = 0

    async def one(client: httpx.AsyncClient, ask: dict[str, Any]) -> Any:
        nonlocal events
        body = {"model": "quire-demo", "prompt": "Once upon a time", "max_tokens": 300,
                "ignore_eos": True, "stream": True, "return_token_ids": True, **ask}  # fmt: skip
        found: dict[int, list[Any]] = {}
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                events += 1
                if events == kill_after:
                    os.kill(server.core().pid, signal.SIGKILL)
                frame = json.loads(line[6:])
                assert "error" not in frame, frame
                for choice in frame["choices"]:
                    parts = found.setdefault(choice["index"], [[], []])
                    parts[0] += choice["token_ids"]
                    parts[1] += (choice["logprobs"] or {}).get("top_logprobs", [])
        return found

    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        result = await asyncio.gather(*(one(client, ask) for ask in ASKS))
    assert kill_after is None or events >= kill_after, "nothing was killed"
    return result


def test_the_same_bytes_after_a_kill() -> None:
    with serving("--logits-processors", *NAMES, env={"PYTHONPATH": f"src:{SUPPORT}"}) as server:
        wanted = asyncio.run(told(server, None))
        assert all(len(tokens) == 300 for found in wanted for tokens, _ in found.values())
        for kill_after in (150, 700):
            assert asyncio.run(told(server, kill_after)) == wanted
