"""A server's busy seconds are recorded, with clients that leave at any moment, and every decision
of its scheduler is found again."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import httpx

from live_server import serving
from patience import PATIENCE
from quire.config import EngineConfig
from quire.core.facts import FactKind
from quire.sim.lockstep import Lockstep, Replayed, SimulatedEngine
from quire.sim.scenario import pool_of
from quire.workload.trace import Trace, read_trace

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


def replayed(path: Path) -> tuple[Trace, list[Replayed]]:
    trace = read_trace(path)
    config, pool = EngineConfig.from_dict(trace.header.config), pool_of(trace.header.info)
    return trace, list(Lockstep(trace, SimulatedEngine(trace, config, pool)))


def test_every_decision_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with serving(*FLAGS, f"--record={path}") as server:
        stayed = asyncio.run(mess(server.url))
        server.wait_idle()
    assert 0.1 < sum(stayed) / len(stayed) < 0.9
    trace, steps = replayed(path)
    assert [step.recorded.step for step in steps if not step.is_same] == []
    seen = {decision.kind for step in steps for decision in step.expected}
    assert {FactKind.PREEMPTED, FactKind.CHUNK, FactKind.WAITS} <= seen
    assert any(step.several for step in trace.steps) and len(steps) > 500
    assert {request.finish for request in trace.requests} >= {"abort", "length", "stop"}


async def begin(url: str, count: int, journal: Path) -> None:
    """Resumable streams, some of the same prompt, of which each has brought some tokens that the
    journal has. It gathers them for a while before it writes."""
    begun = [asyncio.Event() for _ in range(count)]

    async def one(client: httpx.AsyncClient, i: int) -> None:
        asked = {
            "prompt": TEXT[: 20 * (i % 3)] + "So", "max_tokens": 1000, "seed": i, "stream": True,
            "temperature": i % 2, "ignore_eos": True,
        }  # fmt: skip
        seen = 0
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", "/v1/completions", json=asked) as reply:
                async for _ in reply.aiter_lines():
                    seen += 1
                    if seen == 100:
                        begun[i].set()

    headers = {"X-Resumable": "true"}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, headers=headers) as client:
        tasks = [asyncio.create_task(one(client, i)) for i in range(count)]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), PATIENCE)
        for _ in range(2):  # the first may have begun before
            await asyncio.wait_for(written(journal), PATIENCE)
        for task in tasks:
            task.cancel()


async def written(journal: Path) -> None:
    """Until there is more in the folder than now."""

    def size() -> int:
        return sum(path.stat().st_size for path in journal.rglob("*") if path.is_file())

    before = size()
    while size() <= before:
        await asyncio.sleep(0.01)


def test_requests_of_a_server_that_was_killed(tmp_path: Path) -> None:
    """They come with output tokens: whoever records the second server sees them begin so."""
    path, folder = tmp_path / "t.jsonl", tmp_path / "journal"
    journal = f"--journal-dir={folder}"
    with serving(journal) as first:
        asyncio.run(begin(first.url, 12, folder))
        first.process.kill()
    with serving(journal, f"--record={path}") as second:
        assert second.url
        second.wait_idle()
    trace, steps = replayed(path)
    came = [d for step in steps for d in step.expected if d.kind == FactKind.QUEUED]
    assert len(came) == 12 and all(decision.b > 0 for decision in came)
    assert [step.recorded.step for step in steps if not step.is_same] == []
    assert {request.output_len for request in trace.requests} == {1000}
