"""`GET /openapi.json` and `GET /docs` describe what the server decodes."""

from __future__ import annotations

import httpx
import pytest

from fake_engine import FakeEngine
from quire.config.server import ServerConfig
from quire.serving.app import ROUTES, build_app
from quire.serving.exchange import Exchange
from quire.serving.openapi import body_type, document
from quire.serving.server_state import ServerState


def client_for(state: ServerState) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=build_app(state), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_every_route_is_described(state: ServerState) -> None:
    async with client_for(state) as client:
        described = (await client.get("/openapi.json")).json()
    wanted = {
        (path.replace("{id:path}", "{id}"), method.lower())
        for path in ROUTES
        for method in ROUTES.get(path).methods
    }
    assert wanted == {
        (path, method) for path, methods in described["paths"].items() for method in methods
    }
    names = [one["operationId"] for rows in described["paths"].values() for one in rows.values()]
    assert len(set(names)) == len(names)
    for methods in described["paths"].values():
        for operation in methods.values():
            assert operation["summary"]


async def test_a_body_is_described_by_the_type_that_decodes_it(
    state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a handler asks `Exchange.record` for is the type of its row."""
    asked: list[type] = []

    async def record(self: Exchange, kind: type, unsupported: object) -> None:
        asked.append(kind)
        raise RuntimeError("enough")

    monkeypatch.setattr(Exchange, "record", record)
    async with client_for(state) as client:
        for path in ROUTES:
            spec = ROUTES.get(path)
            if "POST" not in spec.methods or "{" in path:
                continue
            asked.clear()
            await client.post(path, json={})
            assert asked == ([] if (body := body_type(spec)) is None else [body]), path


def test_fields_have_their_types() -> None:
    described = document({path: ROUTES.get(path) for path in ROUTES})
    fields = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"type": "number"} in fields["temperature"]["anyOf"]
    assert described["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False


async def test_the_page_names_routes_and_needs_nothing_from_elsewhere(state: ServerState) -> None:
    async with client_for(state) as client:
        page = (await client.get("/docs")).text
    assert "/v1/chat/completions" in page and "temperature" in page
    assert "http://" not in page and "https://" not in page and "<script" not in page


async def test_the_document_can_be_turned_off(engine: FakeEngine) -> None:
    async with client_for(ServerState(ServerConfig(disable_fastapi_docs=True), engine)) as client:
        for path in ("/openapi.json", "/docs"):
            assert (await client.get(path)).status_code == 404
            assert path not in (await client.get("/")).json()["routes"]
    async with client_for(ServerState(ServerConfig(), engine)) as client:
        assert {"/openapi.json", "/docs"} <= (await client.get("/")).json()["routes"].keys()
