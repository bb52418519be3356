"""Request headers of vLLM's clients and routers: which have an effect, which are taken and mean
nothing here, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from asgi_caller import Caller
from fake_engine import FakeEngine
from quire.config import ServerConfig
from quire.core.stats import StepStats
from quire.serving.app import build_app
from quire.serving.load_report import load_report
from quire.serving.server_state import ServerState

ASKED, TOLD = "endpoint-load-metrics-format", "endpoint-load-metrics"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", CHAT | {"max_tokens": 9, "model": "quire-demo"}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 9}}),
]
TEXT = "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"


@pytest.fixture
def loaded(engine: FakeEngine) -> FakeEngine:
    engine.last_step = StepStats(kv_cache_usage=0.25, num_waiting=3)
    return engine


# ---- load ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_load_is_told_at_the_beginning_of_a_reply(
    client: httpx.AsyncClient,
    loaded: FakeEngine,
    path: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    reply = await client.post(path, json=body | {"stream": stream}, headers={ASKED: "text"})
    assert reply.status_code == 200
    assert reply.headers[TOLD] == TEXT


@pytest.mark.parametrize("asked", ["json", "JSON", " Json "])
async def test_as_json(client: httpx.AsyncClient, loaded: FakeEngine, asked: str) -> None:
    reply = await client.post("/v1/completions", json={"prompt": "hi"}, headers={ASKED: asked})
    form, _, report = reply.headers[TOLD].partition(" ")
    assert form == "JSON"
    named = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}
    assert json.loads(report) == {"named_metrics": named}


@pytest.mark.parametrize("asked", ["", "bin", "BIN", "xml", "text, json", "\N{SNOWMAN}"])
async def test_an_unknown_format_is_ignored(
    client: httpx.AsyncClient, loaded: FakeEngine, asked: str
) -> None:
    headers = [(ASKED.encode(), asked.encode())]
    reply = await client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
    assert reply.status_code == 200 and TOLD not in reply.headers


async def test_nobody_asked(client: httpx.AsyncClient, loaded: FakeEngine) -> None:
    assert TOLD not in (await client.post("/v1/completions", json={"prompt": "hi"})).headers


async def test_a_resumable_reply_tells_it_once(state: ServerState, loaded: FakeEngine) -> None:
    """It is the load of then, so who fetches the reply later does not get it."""
    app, body = build_app(state), {"prompt": "hi", "stream": True}
    first = Caller(app, "POST", "/v1/completions", body, {"x-resumable": "true", ASKED: "text"})
    await first.task
    assert first.headers[TOLD] == TEXT
    again = Caller(app, "GET", f"/v1/streams/{first.stream_id}")
    await again.task
    assert again.status == 200 and TOLD not in again.headers


def test_before_the_first_step() -> None:
    told = load_report(b"text", None)
    assert told == TEXT.replace("0.25", "0.0").replace("3.0", "0.0").encode()


# ---- priority ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), BODIES[:3])
async def test_priority_of_the_header_overrides_that_of_the_body(
    path: str, body: dict[str, Any]
) -> None:
    engine = FakeEngine(policy="priority")
    transport = httpx.ASGITransport(build_app(ServerState(ServerConfig(), engine)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for headers, wanted in (({"x-vllm-priority": "-10"}, -10), ({}, 7)):
            reply = await client.post(path, json=body | {"priority": 7}, headers=headers)
            assert reply.status_code == 200, reply.text
            assert engine.submitted[-1][3] == wanted
        for bad in ("high", "1.5", "", "9" * 21):
            reply = await client.post(path, json=body, headers={"x-vllm-priority": bad})
            assert reply.status_code == 400
            assert "X-Vllm-Priority must be an integer" in reply.json()["error"]["message"]
        reply = await client.post(path, json=body, headers={"x-vllm-priority": "9" * 20})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "X-Vllm-Priority")
        assert error["message"].startswith("X-Vllm-Priority must be at most")


# ---- routing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_there_is_one_engine_to_be_routed_to(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    for value, status in (("0", 200), ("1", 400), ("x", 400), ("-1", 400)):
        reply = await client.post(path, json=body, headers={"X-data-parallel-rank": value})
        assert reply.status_code == status, value
    assert "X-data-parallel-rank must be 0" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_session_id_changes_nothing(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    for headers in ({}, {"X-Session-ID": "s" * 500}):
        assert (await client.post(path, json=body, headers=headers)).status_code == 200
    one, other = engine.submitted[-2:]
    assert one[0] == other[0] and one[3:] == other[3:]


# ---- ids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        (*BODIES[0], "chatcmpl-mine"),
        (*BODIES[1], "cmpl-mine"),
    ],
)
async def test_the_callers_id_becomes_part_of_the_replys(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], wanted: str
) -> None:
    reply = await client.post(path, json=body, headers={"X-Request-Id": "mine"})
    assert reply.json()["id"] == wanted and reply.headers["x-request-id"] == "mine"
    own = await client.post(path, json=body | {"request_id": "own"}, headers={"X-Request-Id": "x"})
    assert own.json()["id"] == wanted.replace("mine", "own")


async def test_ids_are_echoed_unless_that_is_turned_off(engine: FakeEngine) -> None:
    for told in (True, False):
        state = ServerState(ServerConfig(enable_request_id_headers=told), engine)
        transport = httpx.ASGITransport(build_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path, body in BODIES:
                for stream in (False, True):
                    given = {"X-Request-Id": "mine"}
                    reply = await client.post(path, json=body | {"stream": stream}, headers=given)
                    assert reply.headers.get("x-request-id") == ("mine" if told else None)
            refused = await client.post("/v1/completions", json={}, headers={"X-Request-Id": "a"})
            assert refused.status_code == 400
            assert refused.headers.get("x-request-id") == ("a" if told else None)
