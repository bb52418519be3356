"""Routes for operators."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine
from quire.config import ServerConfig
from quire.errors import ConfigError, InvalidRequest
from quire.serving.app import build_app
from quire.serving.server_state import ServerState
from silent_core import silent_engine

DEFAULTS = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "scheduling_policy": "fcfs",
    "long_prefill_token_threshold": 0,
}


@pytest.fixture
async def client(state: ServerState) -> Any:
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def test_limits_are_told_and_changed(client: Any, engine: FakeEngine) -> None:
    now = (await client.get("/limits")).json()
    assert set(now) == set(DEFAULTS)
    reply = await client.post("/limits", json={"max_num_seqs": 3, "priorities": {"r": -1}})
    assert reply.status_code == 200
    assert reply.json() == {**now, "max_num_seqs": 3}
    assert engine.changes == [({"r": -1}, {"max_num_seqs": 3})]


@pytest.mark.parametrize(
    "body, words",
    [
        ({"max_num_seqs": "4"}, "max_num_seqs must be an integer"),
        ({"max_num_seq": 4}, "max_num_seqs"),
        ({"priorities": {"r": 1.5}}, "priorities"),
    ],
)
async def test_bad_limits(client: Any, engine: FakeEngine, body: Any, words: str) -> None:
    reply = await client.post("/limits", json=body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]
    assert not engine.changes


async def test_what_the_engine_refuses(client: Any, engine: FakeEngine) -> None:
    engine.refuse = InvalidRequest("--max-num-seqs must be at least 1, got 0")
    reply = await client.post("/limits", json={"max_num_seqs": 0})
    assert reply.status_code == 400
    assert "at least 1, got 0" in reply.json()["error"]["message"]


async def test_prefix_cache_routes(client: Any, engine: FakeEngine) -> None:
    assert (await client.post("/reset_prefix_cache")).json() == {"reset": True}
    answer = await client.post("/explain_prefix", json={"prompt": "abc", "cache_salt": "x"})
    positions = {"num_tokens": 4, "num_cached_tokens": 0, "block_index": 0, "first_difference": 1}
    assert answer.json() == positions, "no token of another caller's prompt"
    assert engine.salts == ["x"]
    assert (await client.post("/explain_prefix", json={"prompt": [1, 2]})).json()["num_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [-1]}, "from 0 to 2047, got -1"),
        ({"prompt": [1, 2**32]}, "token 1 must be an id from 0 to 2047, got 4294967296"),
        ({"prompt": [2048]}, "got 2048"),
        ({"prompt": [10**60]}, "got an integer of 200 bits"),
        ({"prompt": [1] * 2049}, "at most 2048 tokens, the model's context, got 2049"),
        ({"prompt": [1], "cache_salt": ""}, "cache_salt must be a string of 1 to 1024"),
        ({"prompt": [1], "cache_salt": "x" * 1025}, "got a string of 1025 characters"),
    ],
)
async def test_a_bad_question_about_the_cache(body: Any, words: str) -> None:
    engine, _ = silent_engine()
    app = build_app(ServerState(ServerConfig(), engine))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        reply = await client.post("/explain_prefix", json=body)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]


async def test_the_profiler(client: Any, engine: FakeEngine) -> None:
    assert (await client.post("/stop_profile")).status_code == 409
    assert (await client.post("/start_profile")).json() == {"profiling": True}
    again = await client.post("/start_profile")
    assert again.status_code == 409
    assert "already running" in again.json()["error"]["message"]
    assert (await client.post("/stop_profile")).json() == {"profiling": False}
    engine.refuse = ConfigError("set QUIRE_TORCH_PROFILER_DIR")
    reply = await client.post("/start_profile")
    assert reply.status_code == 400 and "PROFILER_DIR" in reply.json()["error"]["message"]


async def test_the_callers_trace_reaches_the_engine(client: Any, engine: FakeEngine) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for path, body in (
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        engine.trace_headers = None
        headers = {"traceparent": parent, "tracestate": "a=1"}
        reply = await client.post(path, json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        assert engine.trace_headers == {"traceparent": parent, "tracestate": "a=1"}
