"""A server whose engine core is stuck: it is replaced, its stacks are told, its requests go on."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from chaos_server import ChaosServer, chaos_server
from core_hook import ONCE, prompt
from patience import PATIENCE

SECRET = "xylophone"


async def text(client: httpx.AsyncClient, words: Any, count: int, seen: Any = None) -> str:
    """What a streamed completion says."""
    body = {
        "prompt": words, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    told = ""
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                told += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
                if seen is not None:
                    seen.set()
    return told


async def strike(
    server: ChaosServer, client: httpx.AsyncClient, kind: str, words: str
) -> list[str]:
    """Have the core get stuck while a bystander's text streams; the text of both."""
    seen = asyncio.Event()
    bystander = asyncio.create_task(text(client, words, 1500, seen))
    await seen.wait()
    if kind == "stopped":
        assert server.hurt_core(signal.SIGSTOP)
        return [await bystander]
    culprit = {"slow": "loop", "still": "hang"}[kind]
    return [await bystander, await text(client, prompt(culprit), 20)]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
async def test_stopped_deadlocked_and_looping_cores_are_replaced(tmp_path: Path) -> None:
    flags = ("--core-restart-limit", "100", "--kv-cache-memory-bytes", str(64 * 2**20))
    with chaos_server(*flags, env={ONCE: str(tmp_path)}) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            words = f"The {SECRET} is"
            expected = await text(client, words, 1500)
            for kind in ("stopped", "still", "slow"):
                before = server.core()
                told = await strike(server, client, kind, words)
                assert told[0] == expected and all(told), kind
                assert server.core() != before
                sample = f'quire:core_stalls_total{{engine="0",kind="{kind}"'
                assert server.metric(sample) == 1
                assert f"is stuck ({kind})" in server.log
        assert "core_hook.py" in server.log and "in hooked_run" in server.log, "the stacks"
        assert SECRET not in server.log
