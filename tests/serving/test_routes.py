"""Who may call what, and what every route has in common."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine
from patience import PATIENCE
from quire.config import RecoveryConfig, ServerConfig
from quire.serving.app import build_app
from quire.serving.server_state import ServerState

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def client_for(state: ServerState) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(state))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.fixture
def locked(engine: FakeEngine) -> ServerState:
    return ServerState(ServerConfig(api_key=["alpha", "beta"]), engine)


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "PUT", "DELETE", "TRACE"])
async def test_no_method_goes_around_the_key(locked: ServerState, method: str) -> None:
    async with client_for(locked) as client:
        assert (await client.request(method, "/v1/models")).status_code == 401


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/livez?x=/v1/models", 200),
        ("/v1/models?x=/livez", 401),
        ("/%6Civez", 200),
        ("/v1/%6Dodels", 401),
        ("/livez%2F..%2Fv1/models", 401),
    ],
)
async def test_decision_follows_the_decoded_path_that_is_routed(
    locked: ServerState, path: str, status: int
) -> None:
    async with client_for(locked) as client:
        assert (await client.get(path)).status_code == status


@pytest.mark.parametrize("host", ["livez", "a/livez?x=", "quire/livez", "", "evil#/health"])
async def test_the_host_header_plays_no_part(locked: ServerState, host: str) -> None:
    async with client_for(locked) as client:
        assert (await client.get("/v1/models", headers={"host": host})).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer alpha"},
        {"authorization": "bearer beta"},
        {"X-API-Key": "beta"},
        {"Authorization": "Bearer wrong", "x-api-key": "alpha"},
    ],
)
async def test_a_key_opens(locked: ServerState, headers: dict[str, str]) -> None:
    async with client_for(locked) as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({}, "missing"),
        ({"Authorization": "alpha"}, "missing"),
        ({"Authorization": "Basic alpha"}, "missing"),
        ({"Authorization": "Bearer "}, "missing"),
        ({"Authorization": "Bearer alph"}, "wrong"),
        ({"Authorization": "Bearer alphaa"}, "wrong"),
        ({"x-api-key": "Alpha"}, "wrong"),
    ],
)
async def test_refusal_without_a_key(
    locked: ServerState, headers: dict[str, str], word: str
) -> None:
    async with client_for(locked) as client:
        reply = await client.get("/v1/models", headers=headers)
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert word in reply.json()["error"]["message"]
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.headers["x-should-retry"] == "false"


async def test_unknown_route(client: httpx.AsyncClient) -> None:
    reply = await client.get("/v1/nothing")
    assert reply.status_code == 404
    assert reply.json() == {
        "error": {
            "message": "There is nothing at /v1/nothing. GET / says what there is.",
            "type": "NotFoundError",
            "param": None,
            "code": 404,
        }
    }


async def test_wrong_method(client: httpx.AsyncClient) -> None:
    reply = await client.get("/v1/chat/completions")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"
    assert reply.json()["error"]["type"] == "MethodNotAllowed"
    assert "GET" in reply.json()["error"]["message"]


async def test_trailing_slash_is_not_redirected(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models/")).status_code == 404
    assert (await client.post("/v1/completions/", json={})).status_code == 404


async def test_mount_path_is_stripped_whether_or_not_the_proxy_did(engine: FakeEngine) -> None:
    state = ServerState(ServerConfig(root_path="/llm", api_key=["k"]), engine)
    async with client_for(state) as client:
        for path in ("/health", "/llm/health"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/models", "/llm/v1/models", "/llm/llm/health", "/llmhealth"):
            assert (await client.get(path)).status_code == 401
        key = {"x-api-key": "k"}
        assert (await client.get("/llm/v1/models", headers=key)).status_code == 200


async def test_request_id_is_returned_and_part_of_the_reply(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "abc-7"})
    assert reply.headers["x-request-id"] == "abc-7"
    assert reply.json()["id"] == "chatcmpl-abc-7"
    made = await client.get("/health")
    assert len(made.headers["x-request-id"]) == 32


@pytest.mark.parametrize("given", ["a b", "", "x" * 129, "é"])
async def test_bad_request_id(client: httpx.AsyncClient, given: str) -> None:
    headers = [(b"x-request-id", given.encode())]
    reply = await client.get("/v1/models", headers=headers)  # type: ignore[arg-type]
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "X-Request-Id"


async def test_request_id_header_can_be_off(engine: FakeEngine) -> None:
    state = ServerState(ServerConfig(enable_request_id_headers=False), engine)
    async with client_for(state) as client:
        assert "x-request-id" not in (await client.get("/v1/models")).headers


async def test_probes_when_ready(client: httpx.AsyncClient) -> None:
    for path in ("/livez", "/readyz", "/health", "/ping"):
        reply = await client.get(path)
        assert (reply.status_code, reply.content) == (200, b"")
    assert (await client.post("/ping")).status_code == 200


def _loading(state: ServerState, engine: FakeEngine) -> None:
    engine.state, engine.progress = "loading", ("weights", 9, 20)


def _dead(state: ServerState, engine: FakeEngine) -> None:
    engine.state = "dead"


def _stalled(state: ServerState, engine: FakeEngine) -> None:
    engine.is_stalled = True


def _stalled_for_good(state: ServerState, engine: FakeEngine) -> None:
    engine.is_stalled = True
    engine.config = replace(engine.config, recovery=RecoveryConfig(core_stall_timeout=0))


def _replacing(state: ServerState, engine: FakeEngine) -> None:
    engine.state, engine.progress = "replacing", ("weights", 9, 20)


def _draining(state: ServerState, engine: FakeEngine) -> None:
    state.draining = True


def _absent(state: ServerState, engine: FakeEngine) -> None:
    state.engine = None


@pytest.mark.parametrize(
    ("change", "code", "api", "health", "livez"),
    [
        (_absent, "engine_loading", 503, 503, 200),
        (_loading, "engine_loading", 503, 503, 200),
        (_replacing, "engine_replacing", 200, 200, 200),
        (_dead, "engine_dead", 503, 503, 503),
        (_stalled, "engine_stalled", 200, 200, 200),
        (_stalled_for_good, "engine_stalled", 200, 503, 200),
        (_draining, "shutting_down", 503, 503, 200),
    ],
)
async def test_not_ready(
    state: ServerState,
    engine: FakeEngine,
    client: httpx.AsyncClient,
    change: Any,
    code: str,
    api: int,
    health: int,
    livez: int,
) -> None:
    """Requests are accepted while a core is replaced, because they are not lost."""
    change(state, engine)
    for path, status in (("/readyz", 503), ("/health", health), ("/ping", health)):
        reply = await client.get(path)
        assert reply.status_code == status
        if status == 503:
            assert reply.json()["error"]["code"] == code
    assert (await client.get("/livez")).status_code == livez
    for path in ("/v1/models", "/v1/chat/completions"):
        method = "GET" if path.endswith("models") else "POST"
        reply = await client.request(method, path, json=CHAT)
        assert reply.status_code == api
        if api == 503:
            assert reply.json()["error"]["code"] == code
            assert reply.headers["retry-after"] == "1"
            assert reply.headers["retry-after-ms"] == "1000"


@pytest.mark.parametrize(
    ("change", "told"),
    [(_loading, "The model is loading"), (_replacing, "The engine core is being replaced")],
)
async def test_readyz_tells_phase_and_percent(
    state: ServerState, engine: FakeEngine, client: httpx.AsyncClient, change: Any, told: str
) -> None:
    change(state, engine)
    error = (await client.get("/readyz")).json()["error"]
    assert (error["phase"], error["percent"]) == ("weights", 45)
    assert error["message"] == f"{told}: weights, 45 %."


async def test_metrics_load_version(client: httpx.AsyncClient) -> None:
    for method in ("GET", "HEAD"):
        reply = await client.request(method, "/metrics")
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "vllm:num_requests_running" in (await client.get("/metrics")).text
    assert (await client.get("/load")).json() == {"server_load": 0}
    assert set((await client.get("/version")).json()) == {"version"}


def test_the_server_never_imports_torch() -> None:
    code = "import sys, quire.serving.server, quire.observability.metrics.prometheus; "
    code += "print([m for m in ('torch', 'pydantic') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert done.stdout.strip() == "[]"
