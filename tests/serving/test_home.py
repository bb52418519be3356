"""`GET /` says what this is and where to go."""

from __future__ import annotations

import httpx

from fake_engine import FakeEngine
from quire import __version__
from quire.config import PoolerSpec, ServerConfig
from quire.serving.app import ROUTES, build_app
from quire.serving.server_state import ServerState

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def client_for(state: ServerState) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(state))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_as_json(client: httpx.AsyncClient) -> None:
    reply = await client.get("/")
    assert reply.headers["content-type"] == "application/json"
    facts = reply.json()
    assert (facts["name"], facts["version"], facts["status"]) == ("quire", __version__, "ready")
    assert facts["models"] == ["quire-demo", "org/small"]
    assert "/v1/chat/completions" in facts["routes"] and "/v1/embeddings" not in facts["routes"]
    assert facts["docs"] and "key" not in facts


async def test_as_a_page() -> None:
    engine = FakeEngine(names=["quire-demo", "<script>"])
    async with client_for(ServerState(ServerConfig(), engine)) as client:
        reply = await client.get("/", headers=BROWSER)
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["vary"] == "accept"
    assert "quire-demo" in reply.text and "/v1/chat/completions" in reply.text
    assert "&lt;script&gt;" in reply.text and "<script>" not in reply.text


async def test_the_model_is_shown_only_to_those_who_may_ask_it(engine: FakeEngine) -> None:
    async with client_for(ServerState(ServerConfig(api_key=["k"]), engine)) as client:
        for headers in ({}, BROWSER, {"x-api-key": "wrong"}):
            reply = await client.get("/", headers=headers)
            assert reply.status_code == 200 and "quire-demo" not in reply.text
            assert "Bearer" in reply.text
        known = await client.get("/", headers={"x-api-key": "k"})
        assert known.json()["models"] == ["quire-demo", "org/small"]


async def test_while_loading_and_when_dead(engine: FakeEngine) -> None:
    async with client_for(ServerState(ServerConfig())) as client:
        assert (await client.get("/")).json()["status"] == "loading"
        assert (await client.get("/", headers=BROWSER)).status_code == 200
    engine.state = "dead"
    async with client_for(ServerState(ServerConfig(), engine)) as client:
        assert (await client.get("/")).json()["status"] == "dead"


async def test_a_pooling_model(engine: FakeEngine) -> None:
    engine.pooler = PoolerSpec("embed", "Bert", True, "mean")
    async with client_for(ServerState(ServerConfig(), engine)) as client:
        routes = (await client.get("/")).json()["routes"]
    assert "/v1/embeddings" in routes and "/v1/chat/completions" not in routes


async def test_it_lists_the_routes_that_say_what_they_are_for(client: httpx.AsyncClient) -> None:
    told = (await client.get("/")).json()["routes"]
    assert told["/v1/completions"] == "POST a text, get its continuation"
    assert told["/metrics"] == "GET Prometheus text"
    specs = {path: ROUTES.get(path) for path in ROUTES}
    assert set(told) == {p for p, s in specs.items() if s.about and s.runner != "pooling"}


async def test_other_methods(client: httpx.AsyncClient) -> None:
    assert (await client.post("/")).status_code == 405
    head = await client.head("/")
    assert head.status_code == 200 and not head.content
