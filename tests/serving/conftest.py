"""A client on the application with a fake engine behind it, without sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from fake_engine import FakeEngine
from quire.config import ServerConfig
from quire.serving.app import build_app
from quire.serving.server_state import ServerState


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def state(engine: FakeEngine) -> ServerState:
    return ServerState(ServerConfig(), engine)


@pytest.fixture
async def client(state: ServerState) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as made:
        yield made
