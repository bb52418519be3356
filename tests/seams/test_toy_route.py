"""A route of a plugin, as `docs/plugins.md` shows it: it needs a key, and is found on demand."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator

import httpx
import pytest

from distributions import Distributions, entry_points
from documented import install, modules
from fake_engine import FakeEngine
from live_server import serving
from patience import PATIENCE
from quire.config import ServerConfig
from quire.serving.app import build_app
from quire.serving.server_state import ServerState

KEY = {"x-api-key": "k"}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    state = ServerState(ServerConfig(api_key=["k"]), FakeEngine())
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def test_a_server_offers_the_documented_route(distributions: Distributions) -> None:
    install("A route", distributions)
    assert len(modules("A route")["count_route"].splitlines()) <= 25
    with (
        serving("--api-key", "k") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        assert client.post("/count", json={"text": "One"}).status_code == 401
        client.headers.update(KEY)
        reply = client.post("/count", json={"text": "One"})
        assert reply.status_code == 200 and reply.json()["num_tokens"] >= 1
        assert len(reply.headers["x-request-id"]) == 32
        bad = client.post("/count", json={"text": 5}).json()["error"]["message"]
        assert bad == "text must be a string, got 5."
        assert client.post("/count", json={"text": "a", "model": "b"}).status_code == 404
        assert client.get("/count").status_code == 405
        assert client.get("/counts").status_code == 404
        told = client.get("/").json()["routes"]
        assert told["/count"] == "POST a text, get its length in tokens"
        assert 'handler="/count"' in client.get("/metrics").text


async def test_it_is_imported_when_a_path_is_asked_for_that_is_not_there(
    client: httpx.AsyncClient, distributions: Distributions
) -> None:
    source = modules("A route")["count_route"]
    rows = entry_points(**{"route__/lazy": "lazy_route:ROUTE"})
    distributions.install("quire-lazy", {"lazy_route": source}, rows)
    assert (await client.get("/v1/models", headers=KEY)).status_code == 200
    assert (await client.get("/lazy")).status_code == 401
    assert "lazy_route" not in sys.modules
    assert (await client.post("/lazy", json={"text": "abc"}, headers=KEY)).status_code == 200
    assert "lazy_route" in sys.modules


async def test_broken_ones_are_logged_and_disturb_nothing(
    client: httpx.AsyncClient,
    distributions: Distributions,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    source = modules("A route")["count_route"]
    given = {
        "whole": source,
        "everyone": source.replace("Role.USER", "Role.OPEN"),
        "crash": "1 / 0",
        "plain": "ROUTE = 3",
    }
    rows = {f"route__/{name}": f"{name}_route:ROUTE" for name in given}
    rows |= {"route__noslash": "whole_route:ROUTE"}
    files = {f"{name}_route": text for name, text in given.items()}
    distributions.install("quire-mixed", files, entry_points(**rows))
    with caplog.at_level(logging.ERROR, logger="quire"):
        reply = await client.post("/whole", json={"text": "abc"}, headers=KEY)
    assert reply.status_code == 200
    told = "\n".join(caplog.messages)
    assert "route '/crash' (entry point route./crash of quire-mixed 1.0) cannot be imported" in told
    assert "'/plain' (entry point route./plain of quire-mixed 1.0) is not an instance of" in told
    assert "'noslash' must begin with a slash" in told
    assert "/everyone is open to everybody; it must need a key" in told
    for path in ("/crash", "/plain", "/everyone"):
        assert (await client.post(path, json={"text": "abc"}, headers=KEY)).status_code == 404
        assert (await client.post(path, json={"text": "abc"})).status_code == 401
