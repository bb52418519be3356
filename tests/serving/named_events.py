"""Streams of named events, and servers whose model says what a test has written for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

import toy_parsers as toys
from quire.config import ServerConfig
from quire.registry import Registry
from quire.serving.app import build_app
from quire.serving.server_state import ServerState
from scripted_core import ScriptedCore, scripted_engine


def events(text: str) -> list[dict[str, Any]]:
    """The data of all events, each of which has its name twice."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def scripted_server(
    monkeypatch: pytest.MonkeyPatch,
    texts: Sequence[str],
    parsers: Sequence[str] = (),
    seed: int = 0,
    **options: Any,
) -> tuple[httpx.AsyncClient, ScriptedCore, ServerState]:
    """A client of a server whose model says the texts, read by the toy parsers of these names."""
    monkeypatch.setattr("quire.serving.server_state.PARSERS", Registry("parser", toys.TABLE))
    engine, core = scripted_engine(texts, seed)
    state = ServerState(ServerConfig(**options))
    state.serve(engine, parsers)
    transport = httpx.ASGITransport(build_app(state))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost"), core, state
