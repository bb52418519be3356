"""Requests find their engine by the name of the model, after their body has been read."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine
from quire.serving.server_state import ServerState

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
GOOD: dict[str, Any] = {"messages": [USER]}


@pytest.fixture
def other(state: ServerState) -> FakeEngine:
    """A second engine on the same server."""
    made = FakeEngine(reply="Bonjour", names=("other",))
    state.serve(made)
    return made


def loading(engine: FakeEngine) -> None:
    engine.state, engine.progress = "loading", ("weights", 9, 20)


async def refused(client: httpx.AsyncClient, path: str, body: Any) -> tuple[int, str]:
    reply = await client.post(path, json=body)
    return reply.status_code, reply.json()["error"]["code"]


async def test_each_name_has_its_engine(
    client: httpx.AsyncClient, engine: FakeEngine, other: FakeEngine
) -> None:
    for name, text, asked in [("quire-demo", "Hey", engine), ("other", "Bonjour", other)]:
        reply = (await client.post(CHAT, json=GOOD | {"model": name})).json()
        assert (reply["model"], reply["choices"][0]["message"]["content"]) == (name, text)
        body = {"prompt": "a", "model": name}
        assert (await client.post(TEXT, json=body)).json()["choices"][0]["text"] == text
        assert len(asked.submitted) == 2
    reply = (await client.post(CHAT, json=GOOD)).json()
    assert (reply["model"], len(engine.submitted)) == ("quire-demo", 3), "the first is the default"


async def test_equal_names_of_one_engine_are_one(state: ServerState) -> None:
    state.engine = FakeEngine(names=("a", "a", "b"))
    assert list(state.models) == ["a", "b"] and len(state.engines) == 1


async def test_all_names_are_listed_and_told(client: httpx.AsyncClient, other: FakeEngine) -> None:
    other.max_model_len = 9
    cards = (await client.get("/v1/models")).json()["data"]
    listed = [(card["id"], card["max_model_len"]) for card in cards]
    assert listed == [("quire-demo", 512), ("org/small", 512), ("other", 9)]
    error = (await client.post(CHAT, json=GOOD | {"model": "x"})).json()["error"]
    assert error["message"].endswith("Served here: `quire-demo`, `org/small`, `other`.")


async def test_a_model_that_loads_holds_up_its_own_requests_alone(
    client: httpx.AsyncClient, engine: FakeEngine, other: FakeEngine
) -> None:
    loading(other)
    assert (await client.post(CHAT, json=GOOD)).status_code == 200
    assert await refused(client, CHAT, GOOD | {"model": "other"}) == (503, "engine_loading")
    assert await refused(client, CHAT, GOOD | {"model": "x"}) == (404, "model_not_found")
    engine.state, other.state = "loading", "ready"
    assert (await client.post(CHAT, json=GOOD | {"model": "other"})).status_code == 200
    assert await refused(client, CHAT, GOOD) == (503, "engine_loading")


@pytest.mark.parametrize("body", [GOOD | {"model": "x"}, {"messages": 5}, {}, 5])
async def test_a_server_that_takes_nothing_says_so_whatever_it_is_sent(
    client: httpx.AsyncClient, state: ServerState, engine: FakeEngine, body: Any
) -> None:
    """Who tries again later must not hear before that a name or a body is wrong: by then it may
    not be."""
    loading(engine)
    for path in (CHAT, TEXT, "/tokenize", "/v1/embeddings", "/rerank"):
        assert await refused(client, path, body) == (503, "engine_loading")
    engine.state = "dead"
    assert await refused(client, CHAT, body) == (503, "engine_dead")
    state.draining = True
    assert await refused(client, CHAT, body) == (503, "shutting_down")


async def test_a_body_is_not_read_while_nothing_takes_requests(
    client: httpx.AsyncClient, state: ServerState, engine: FakeEngine, other: FakeEngine
) -> None:
    async def body() -> Any:
        read.append(1)
        yield b"{}"

    read: list[int] = []
    headers = {"content-type": "application/json"}
    loading(engine)
    loading(other)
    assert (await client.post(CHAT, content=body(), headers=headers)).status_code == 503
    assert not read
    other.state = "ready"
    assert (await client.post(CHAT, content=body(), headers=headers)).status_code == 400
    assert read


async def test_a_drain_that_begins_while_a_body_arrives_refuses_it(
    client: httpx.AsyncClient, state: ServerState, engine: FakeEngine
) -> None:
    async def body() -> Any:
        state.draining = True
        yield b'{"prompt": "a"}'

    reply = await client.post(TEXT, content=body(), headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
    assert not engine.submitted
