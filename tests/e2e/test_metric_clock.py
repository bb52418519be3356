"""TTFT, ITL and TPOT of the metrics agree with a client's own clock."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httpx

from live_server import Server, serving

REQUESTS, TOLERANCE = 12, 0.02
SECONDS = 0.5
"""About how long a request runs alone, whatever the machine: they run one after the other, so the
mean TTFT is seconds, of which the way to the server and back is far less than the tolerance."""
LEAST_TTFT = 2.0
"""Seconds of mean TTFT that make the comparison one of the server, not of the way to it."""
MOST_TOKENS = 1900
APART = 0.05
NAMES = (
    "time_to_first_token_seconds",
    "request_time_per_output_token_seconds",
    "inter_token_latency_seconds",
)


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


async def ask(client: httpx.AsyncClient, number: int, tokens: int) -> Seen:
    body = {
        "model": "quire-demo",
        "prompt": f"Request {number}: tell me a story.",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    # One after the other: what the client itself takes to send the others is not the server's.
    await asyncio.sleep(number * APART)
    seen = Seen(time.monotonic(), [])
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                seen.times.append(time.monotonic())
    return seen


async def ask_all(url: str, tokens: int) -> list[Seen]:
    limits = httpx.Limits(max_connections=REQUESTS, max_keepalive_connections=REQUESTS)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        # A connection for each: what connecting takes is not the server's.
        await asyncio.gather(*(client.get("/health") for _ in range(REQUESTS)))
        return list(await asyncio.gather(*(ask(client, i, tokens) for i in range(REQUESTS))))


async def tokens_per(url: str, seconds: float) -> int:
    """Tokens that one request gets in a time."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await ask(client, 0, 20)
        seen = await ask(client, 0, 100)
    return max(50, min(MOST_TOKENS, round(seconds * 99 / seen.decode)))


def totals(server: Server) -> dict[str, float]:
    return {
        f"{name}_{part}": server.metric(f"vllm:{name}_{part}")
        for name in NAMES
        for part in ("sum", "count")
    }


def test_metrics_agree_with_a_clients_clock() -> None:
    """Sums over the same requests are compared, in a queue that makes them long: what the client
    sees beyond them is the way there and back, whatever else the machine does."""
    with serving("--max-num-seqs", "1") as server:
        tokens = asyncio.run(tokens_per(server.url, SECONDS))
        while True:
            before = totals(server)
            seen = asyncio.run(ask_all(server.url, tokens))
            after = totals(server)
            ttft = sum(s.ttft for s in seen) / REQUESTS
            if ttft >= LEAST_TTFT or tokens == MOST_TOKENS:
                break
            # The machine was busier while its speed was measured than it is now.
            tokens = min(MOST_TOKENS, round(1.5 * tokens * LEAST_TTFT / ttft))
    told = {name: after[name] - before[name] for name in after}
    # a step's output may reach the client's stream merged with the next
    assert told["inter_token_latency_seconds_count"] == REQUESTS * (tokens - 1)
    decode = sum(s.decode for s in seen) / REQUESTS / (tokens - 1)
    expected = dict.fromkeys(NAMES, decode)
    expected["time_to_first_token_seconds"] = ttft
    for name, value in expected.items():
        mean = told[f"{name}_sum"] / told[f"{name}_count"]
        assert abs(mean - value) <= TOLERANCE * value, f"{name}: {mean} or {value}"
