"""Whose turn a request takes under the fair policy: its key's, or its `user`'s."""

from __future__ import annotations

import httpx
import pytest

from fake_engine import FakeEngine
from quire.config import ServerConfig
from quire.serving.app import build_app
from quire.serving.server_state import ServerState

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETION = {"prompt": "hi", "max_tokens": 2}


@pytest.mark.parametrize(
    ("keys", "headers", "user", "expected"),
    [
        ([], {}, None, ""),
        ([], {}, "ann", "ann"),
        (["one"], {"x-api-key": "one"}, "ann", "ann"),
        (["one", "two"], {"authorization": "Bearer two"}, "ann", "key 1"),
        (["one", "two"], {"x-api-key": "one"}, None, "key 0"),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
async def test_client(
    engine: FakeEngine,
    path: str,
    body: dict[str, object],
    keys: list[str],
    headers: dict[str, str],
    user: str | None,
    expected: str,
) -> None:
    state = ServerState(ServerConfig(api_key=keys), engine)
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        given = {**body, "user": user} if user else body
        reply = await client.post(path, json=given, headers=headers)
    assert reply.status_code == 200
    assert engine.clients == [expected]
