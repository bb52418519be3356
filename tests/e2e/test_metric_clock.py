"""TTFT, ITL and TPOT of the metrics agree with a client's own clock."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httpx

from live_server import Server, serving

REQUESTS, TOKENS, TOLERANCE = 8, 160, 0.02
WAY = {"time_to_first_token_seconds": 0.1}
"""Seconds that connecting and parsing may take on a busy machine, besides: only the first token's
clock starts before them."""


@dataclass
class Seen:
    """One request as its client sees it."""

    started: float
    times: list[float]

    @property
    def ttft(self) -> float:
        return self.times[0] - self.started

    @property
    def decode(self) -> float:
        return self.times[-1] - self.times[0]


async def ask(client: httpx.AsyncClient, number: int) -> Seen:
    body = {
        "model": "quire-demo",
        "prompt": f"Request {number}: tell me a story.",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    seen = Seen(time.monotonic(), [])
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                seen.times.append(time.monotonic())
    return seen


async def ask_all(url: str) -> list[Seen]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await client.get("/health")
        return list(await asyncio.gather(*(ask(client, i) for i in range(REQUESTS))))


def mean(server: Server, name: str) -> float:
    return server.metric(f"vllm:{name}_sum") / server.metric(f"vllm:{name}_count")


def test_metrics_agree_with_a_clients_clock() -> None:
    """Sums over the same requests are compared, in a queue that makes them long: what the client
    sees beyond them is the way there and back, whatever else the machine does."""
    with serving("--max-num-seqs", "2") as server:
        seen = asyncio.run(ask_all(server.url))
        decode = sum(s.decode for s in seen)
        expected = {
            "time_to_first_token_seconds": sum(s.ttft for s in seen) / REQUESTS,
            "request_time_per_output_token_seconds": decode / REQUESTS / (TOKENS - 1),
            "inter_token_latency_seconds": decode / REQUESTS / (TOKENS - 1),
        }
        told = {name: mean(server, name) for name in expected}
        # a step's output may reach the client's stream merged with the next
        assert server.metric("vllm:inter_token_latency_seconds_count") == REQUESTS * (TOKENS - 1)
    for name, value in expected.items():
        allowed = TOLERANCE * value + WAY.get(name, 0.0)
        assert abs(told[name] - value) <= allowed, f"{name}: {told[name]} or {value}"
