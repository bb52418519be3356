"""Responses and Messages whose engine core is killed go on, and are what they would have been."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import psutil

from live_server import serving
from patience import PATIENCE

TURN = [{"role": "user", "content": "A story"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FORM = {"type": "json_schema", "schema": SCHEMA}
LONG = {"max_output_tokens": 300, "ignore_eos": True}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("responses", {"input": "Hi", "seed": 2, "temperature": 1, **LONG}),
    ("responses", {"input": TURN, "seed": 3, "top_logprobs": 2, "stream": False, **LONG}),
    ("responses", {"input": "x", "temperature": 0, "text": {"format": {"name": "n", **FORM}},
                   "max_output_tokens": 200}),
    ("messages", {"messages": TURN, "seed": 4, "max_tokens": 300}),
    ("messages", {"messages": TURN, "seed": 5, "max_tokens": 300, "stream": False}),
    ("messages", {"messages": TURN, "temperature": 0, "max_tokens": 200,
                  "output_config": {"format": FORM}}),
]  # fmt: skip


async def ask(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], seen: Callable[[], None]
) -> Any:
    """What a reply says: its text, and how it ended. Events may be fewer and larger."""
    given = {"model": "quire-demo", "stream": True, **body}
    texts, events = [], []
    async with client.stream("POST", f"/v1/{path}", json=given) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            seen()
            if line.startswith(("{", "data: {")):
                events.append(json.loads(line.removeprefix("data: ")))
                delta = events[-1].get("delta")
                if isinstance(delta, str):
                    texts.append(delta)
                elif isinstance(delta, dict):
                    texts.append(delta.get("text", ""))
    last = events[-1].get("response", events[-1])
    if path == "responses":
        assert last["status"] in ("completed", "incomplete"), last
        (part,) = last["output"][0]["content"]
        assert not given["stream"] or "".join(texts) == part["text"]
        return part, last["status"], last["usage"]["output_tokens"]
    if given["stream"]:
        assert events[-1] == {"type": "message_stop"}
        end = events[-2]
        return "".join(texts), end["delta"], end["usage"]["output_tokens"]
    return last["content"], last["stop_reason"], last["usage"]["output_tokens"]


async def background(client: httpx.AsyncClient) -> Any:
    body = {"input": "In the background", "background": True, "seed": 9, **LONG}
    made = (await client.post("/v1/responses", json=body)).json()
    while made["status"] in ("queued", "in_progress"):
        made = (await client.get(f"/v1/responses/{made['id']}")).json()
    return made["status"], made["output"][0]["content"]


async def ask_all(url: str, seen: Callable[[], None]) -> list[Any]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        asked = (ask(client, path, body, seen) for path, body in BODIES)
        return list(await asyncio.gather(*asked, background(client)))


def test_replies_go_on_with_the_same_bytes() -> None:
    with serving("--no-enable-prefix-caching") as server:
        wanted = asyncio.run(ask_all(server.url, lambda: None))
        left = 200

        def seen() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                children = psutil.Process(server.process.pid).children()
                (core,) = (c for c in children if "EngineCore" in " ".join(c.cmdline()))
                os.kill(core.pid, signal.SIGKILL)

        got = asyncio.run(ask_all(server.url, seen))
        assert left <= 0, "nothing was killed"
        for (path, body), one, want in zip([*BODIES, ("background", {})], got, wanted, strict=True):
            assert one == want, (path, body)
        assert "SIGKILL" in server.log, "it was the core"
