"""A server whose engine core is killed: the same streams go on, with the same bytes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from typing import Any

import httpx
import pytest

from live_server import Server, serving
from patience import PATIENCE, wait_for

KILLS = 3
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
}}}  # fmt: skip
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "Once upon a time", "temperature": 0}),
    ("completions", {"prompt": "One day", "seed": 5, "temperature": 1, "top_p": 0.9}),
    ("completions", {"prompt": "Two", "seed": 6, "temperature": 1.3, "n": 4}),
    ("completions", {"prompt": "A", "seed": 7, "logprobs": 3, "repetition_penalty": 1.2}),
    ("completions", {"prompt": "The end", "seed": 8, "presence_penalty": 1.5, "echo": True}),
    ("completions", {"prompt": "The cat", "seed": 9, "temperature": 1, "stop": ["zq", " the old"]}),
    ("completions", {"prompt": "It was", "seed": 1, "logit_bias": {"300": 3}, "min_tokens": 200}),
    ("completions", {"prompt": "Numbers", "seed": 3, "prompt_logprobs": 2, "stream": False}),
    ("completions", {"prompt": "One of", "seed": 12, "logprobs": 1, "structured_outputs": {
        "choice": [f"the {word} fox and " * 30 for word in ("red", "big")]}}),
    ("completions", {"prompt": "Nested", "seed": 13, "structured_outputs": {
        "grammar": 'root ::= "(" root ")" | [a-z ]{300,320} [0-9]'}}),
    ("completions", {"prompt": "Well", "seed": 14, "structured_outputs": {
        "regex": "[a-z ]{300,320}[0-9]",
        "reasoning": {"opening": "Hm:", "closing": ".", "is_open": True}}}),
    ("chat/completions", {"messages": [{"role": "user", "content": "A tag"}], "seed": 15,
                          "response_format": {"type": "structural_tag", "format": {
                              "type": "tag", "begin": "<a>", "end": "</a>", "content": {
                                  "type": "regex", "pattern": "[a-z ]{300,320}"}}}}),
    ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "seed": 2}),
    ("chat/completions", {"messages": [{"role": "user", "content": "Weather in Rome?"}],
                          "tools": [TOOL], "tool_choice": "required", "seed": 11}),
    ("chat/completions", {"messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
                          "tools": [TOOL], "temperature": 0, "parallel_tool_calls": False}),
    ("chat/completions", {"messages": [{"role": "user", "content": "A story"}], "stream": False,
                          "seed": 4, "logprobs": True, "top_logprobs": 2}),
]  # fmt: skip


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], seen: Any) -> list[str]:
    """Lines of a reply, without what differs between any two."""
    given = {"model": "quire-demo", "max_tokens": 300, "ignore_eos": True, "stream": True, **body}
    if given["stream"]:
        given["stream_options"] = {"include_usage": True}
    lines = []
    async with client.stream("POST", f"/v1/{path}", json=given) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            seen()
            if line.startswith(("{", "data: {")):
                frame = json.loads(line.removeprefix("data: "))
                assert "error" not in frame, frame
                del frame["id"], frame["created"]
                line = json.dumps(frame)
            if not line.startswith(":"):
                lines.append(line)
    return lines


def fold(lines: list[str]) -> Any:
    """A reply whatever its chunks: a stream that waited has fewer, larger ones."""
    frames = [json.loads(line.removeprefix("data: ")) for line in lines if '"choices"' in line]
    told: dict[int, list[Any]] = {}
    usage = None
    for frame in frames:
        usage = frame.get("usage") or usage
        for choice in frame["choices"]:
            parts = told.setdefault(choice["index"], ["", None, []])
            message = choice.get("delta") or choice.get("message") or choice
            parts[0] += message.get("text") or message.get("content") or ""
            for call in message.get("tool_calls") or ():
                parts[0] += (call["function"].get("name") or "") + call["function"]["arguments"]
            parts[1] = choice["finish_reason"] or parts[1]
            parts[2].append(choice.get("logprobs"))
    for parts in told.values():
        parts[2] = [
            entry
            for scores in parts[2]
            if scores
            for entry in (scores.get("content") or scores.get("token_logprobs"))
        ]
    return told, usage, [frame.get("prompt_logprobs") for frame in frames[:1]]


async def killed_once(server: Server, wanted: list[Any], rng: random.Random) -> None:
    """All requests at once; the core is killed when some number of lines has come."""
    left = rng.randrange(1, 1500)
    url = server.url

    def seen() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(server.core().pid, signal.SIGKILL)

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        got = await asyncio.gather(*(ask(client, path, body, seen) for path, body in BODIES))
    assert left <= 0, "nothing was killed"
    for (path, body), lines, want in zip(BODIES, got, wanted, strict=True):
        assert fold(lines) == want, (path, body)


async def reference(url: str) -> list[Any]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        return [fold(await ask(client, path, body, lambda: None)) for path, body in BODIES]


@pytest.mark.parametrize("spare", [False, True])
def test_streams_go_on_with_the_same_bytes(spare: bool) -> None:
    rng = random.Random(0)
    with serving("--no-enable-prefix-caching", *["--warm-spare"] * spare) as server:
        wanted = asyncio.run(reference(server.url))
        for _ in range(KILLS):
            if spare:
                wait_for(lambda: server.metric("quire:spare_core_ready") == 1, "a spare core")
            pids = {child.pid for child in server.children()}
            asyncio.run(killed_once(server, wanted, rng))
            assert (server.core().pid in pids) == spare
        assert "promotion" in server.log if spare else "promotion" not in server.log
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
