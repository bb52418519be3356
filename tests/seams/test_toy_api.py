"""An HTTP API is a handler and a row: another body, other words for errors, another rendering of
the same events, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

import toy_api
import toy_parsers as toys
from quire.config import ServerConfig
from quire.errors import NotFound
from quire.registry import Registry
from quire.serving import app
from quire.serving.server_state import ServerState
from scripted_core import ScriptedCore, scripted_engine

Serve = Callable[..., Any]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    rows = {path: app.ROUTES.get(path) for path in app.ROUTES} | {"/say": toy_api.ROUTE}
    monkeypatch.setattr(app, "ROUTES", Registry("route", rows, error=NotFound))
    parsers = Registry("output parser", toys.TABLE)
    monkeypatch.setattr("quire.serving.server_state.PARSERS", parsers)

    @asynccontextmanager
    async def make(
        text: str, *parsers: str, **options: Any
    ) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedCore, ServerState]]:
        engine, core = scripted_engine([text])
        state = ServerState(ServerConfig(**options))
        state.serve(engine, parsers)
        transport = httpx.ASGITransport(app.build_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client, core, state
        assert (state.in_flight, state.active_ids) == (0, set())

    return make


def folded(streamed: str) -> list[Any]:
    """The parts of a whole reply, from the lines of a stream."""
    said: list[Any] = []
    for told in map(json.loads, streamed.splitlines()):
        kind, event = told["kind"], told["event"]
        if kind in ("say", "think"):
            if said and said[-1][0] == kind:
                said[-1][1] += event["text"]
            else:
                said.append([kind, event["text"]])
        elif kind == "call":
            said.append([event["name"], ""])
        elif kind == "arguments":
            said[-1][1] += event["text"]
    return said


async def test_streamed_and_whole(serve: Serve) -> None:
    async with serve(toys.TEXT, "thoughts", "toy") as (client, _, _):
        whole = (await client.post("/say", json={"text": "hi"})).json()
        reply = await client.post("/say", json={"text": "hi", "stream": True})
        assert reply.headers["content-type"] == "application/x-ndjson"
    parts = [
        [part["name"], part["arguments"]] if "name" in part else part["text"]
        for part in whole["said"]
    ]
    expected = [[n, t] if n not in ("text", "reasoning") else t for n, t in toys.PARTS]
    assert parts == expected
    words = {"text": "say", "reasoning": "think"}
    assert folded(reply.text) == [[words.get(n, n), t] for n, t in toys.PARTS]
    end = json.loads(reply.text.splitlines()[-1])
    assert (end["kind"], end["event"]["reason"], end["event"]["num_calls"]) == ("end", "stop", 3)
    assert whole["tokens"]["completion_tokens"] > 20


async def test_chat_on_the_same_server_renders_its_own_way(serve: Serve) -> None:
    async with serve("plain") as (client, _, _):
        assert (await client.post("/say", json={"text": "hi"})).json()["said"][0]["text"] == "plain"
        body = {"messages": [toys.USER]}
        reply = (await client.post("/v1/chat/completions", json=body)).json()
        assert reply["choices"][0]["message"]["content"] == "plain"


async def test_errors_are_said_in_its_own_words(serve: Serve) -> None:
    async with serve("well § done", "clumsy") as (client, core, state):
        reply = await client.post("/say", json={"text": 5})
        assert reply.status_code == 400
        assert reply.json() == {"oops": "text must be a string, got 5."}
        reply = await client.post("/say", json={"text": "hi", "model": "x"})
        assert (reply.status_code, list(reply.json())) == (404, ["oops"])
        reply = await client.post("/say", json={"text": "hi"})
        assert (reply.status_code, list(reply.json())) == (500, ["oops"])
        reply = await client.post("/say", json={"text": "hi", "stream": True})
        assert reply.status_code == 200
        assert [list(json.loads(told)) for told in reply.text.splitlines()][-1] == ["oops"]
        assert "secret" not in reply.text
        state.draining = True
        reply = await client.post("/say", json={"text": "hi"})
        assert (reply.status_code, list(reply.json())) == (503, ["oops"])
        assert len(core.sent) == 2
        chat = await client.post("/v1/chat/completions", json={"messages": [toys.USER]})
        assert list(chat.json()) == ["error"], "others keep theirs"


async def test_its_role_holds(serve: Serve) -> None:
    async with serve("plain", api_key=["k"]) as (client, _, _):
        assert (await client.post("/say", json={"text": "hi"})).status_code == 401
        headers = {"x-api-key": "k"}
        assert (await client.post("/say", json={"text": "hi"}, headers=headers)).status_code == 200
