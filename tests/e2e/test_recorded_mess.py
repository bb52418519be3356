"""A server's busy hour is recorded, with clients that leave at any moment, and every decision of
its scheduler is found again."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx

from live_server import serving
from patience import PATIENCE
from quire.config import EngineConfig
from quire.core.facts import FactKind
from quire.sim.lockstep import Lockstep, SimulatedEngine
from quire.sim.scenario import pool_of
from quire.workload.trace import read_trace

REQUESTS = 900
TEXT = "The capital of France is a city that many people like to visit in spring. " * 6
SCHEMA = {
    "type": "object",
    "properties": {"a_long_name_to_be_forced": {"type": "integer"}},
    "required": ["a_long_name_to_be_forced"],
    "additionalProperties": False,
}
FLAGS = [
    "--num-gpu-blocks-override=130",
    "--swap-space=0.05",
    "--preemption-mode=swap",
    "--max-num-seqs=32",
    "--max-num-batched-tokens=256",
    "--scheduling-policy=priority",
]
"""Of the KV cache there is hardly enough for one long request, so that many are preempted."""


def body(rng: random.Random) -> dict[str, Any]:
    """Prompts that part at any token; every other field now and then."""
    tokens = rng.choice([1, 2, 10, 60, 300, 600])
    asked: dict[str, Any] = {
        "ignore_eos": rng.random() < 0.5,
        "prompt": TEXT[: rng.randrange(5, 400)] + rng.choice(["", "Once upon ", "2 + 3? "]),
        "max_tokens": tokens, "temperature": rng.choice([0, 0.8]), "priority": rng.randrange(3),
        "stream": rng.random() < 0.5,
    }  # fmt: skip
    sometimes: list[dict[str, Any]] = [
        {"cache_salt": rng.choice("abc")}, {"structured_outputs": {"json": SCHEMA}},
        {"stop": ["a"]}, {"n": 3, "temperature": 0.8}, {"prompt_logprobs": 2, "stream": False},
        {"min_tokens": min(5, tokens)},
    ]  # fmt: skip
    for fields in sometimes:
        if rng.random() < 0.15:
            asked |= fields
    return asked


async def ask(client: httpx.AsyncClient, asked: dict[str, Any], start: float, stays: float) -> bool:
    """Whether the client saw the end of the answer."""
    await asyncio.sleep(start)
    try:
        reply = await asyncio.wait_for(client.post("/v1/completions", json=asked), stays)
    except TimeoutError:
        return False
    assert reply.status_code == 200, reply.text
    return True


async def mess(url: str) -> list[bool]:
    rng = random.Random(1)
    limits = httpx.Limits(max_connections=300)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
        return await asyncio.gather(
            *(
                ask(client, body(rng), 4 * rng.random(), rng.choice([PATIENCE, 0.001, 0.03, 0.3]))
                for _ in range(REQUESTS)
            )
        )


def test_every_decision_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with serving(*FLAGS, f"--record={path}") as server:
        stayed = asyncio.run(mess(server.url))
        server.wait_idle()
    assert 0.1 < sum(stayed) / len(stayed) < 0.9
    trace = read_trace(path)
    config, pool = EngineConfig.from_dict(trace.header.config), pool_of(trace.header.info)
    steps = list(Lockstep(trace, SimulatedEngine(trace, config, pool)))
    assert [step.recorded.step for step in steps if not step.is_same] == []
    seen = {decision.kind for step in steps for decision in step.expected}
    assert {FactKind.PREEMPTED, FactKind.CHUNK, FactKind.WAITS} <= seen
    assert any(step.several for step in trace.steps) and len(steps) > 500
    assert {request.finish for request in trace.requests} >= {"abort", "length", "stop"}
