"""`POST /invocations` answers as the route that the fields of a body belong to, or refuses it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from asgi_caller import Caller
from fake_engine import FakeEngine
from quire.config import PoolerSpec, ServerConfig
from quire.errors import UnsupportedTask
from quire.serving.app import ROUTES, build_app
from quire.serving.invocations import SHAPES
from quire.serving.server_state import ServerState

USER = [{"role": "user", "content": "hi"}]
HEADERS = {"x-request-id": "r"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/chat/completions", {"messages": USER, "stream": True, "n": 2}),
        ("/v1/completions", {"prompt": "hi", "model": "org/small"}),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
        ("/v1/completions", {"prompt": "hi", "tempera": 1}),
        ("/v1/chat/completions", {"messages": []}),
    ],
)
async def test_the_reply_is_that_of_the_route(path: str, body: dict[str, Any]) -> None:
    replies = []
    for route in (path, "/invocations"):
        transport = httpx.ASGITransport(build_app(ServerState(ServerConfig(), FakeEngine())))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            reply = await client.post(route, json=body, headers=HEADERS)
        text = reply.text
        if reply.status_code == 200:
            text = "".join(part for part in text.split(",") if '"created"' not in part)
        replies.append((reply.status_code, reply.headers["content-type"], text))
    assert replies[0] == replies[1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": USER, "prompt": "hi"}, ["/v1/chat/completions and /v1/completions"]),
        ({"inputs": "hi"}, ["no shape", "messages (/v1/chat/completions)", "prompt"]),
        ({"input": "hi"}, ["no shape"]),
        ({"query": "a", "documents": ["b"]}, ["no shape"]),
        ({}, ["no shape"]),
        ([], ["must be"]),
        ({"model": 5, "prompt": "hi"}, ["model must be a string", "5"]),
    ],
)
async def test_one_clear_refusal(client: httpx.AsyncClient, body: Any, words: list[str]) -> None:
    reply = await client.post("/invocations", json=body)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert all(word in message for word in words), message


async def test_bodies_that_are_no_requests(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    json = {"content-type": "application/json"}
    for content, status in ((b"{", 400), (b"\xff", 400), (b'{"prompt": "hi", "prompt": 5}', 400),
                            (b'{"a\xeb\xef": 2}', 400), (b'{"prompt": "a", "model": "\xff"}', 400),
                            (b'{"x": ' + b"[" * 9999 + b"]" * 9999 + b"}", 400)):  # fmt: skip
        reply = await client.post("/invocations", content=content, headers=json)
        assert reply.status_code == status, content
    assert (await client.post("/invocations", content=b"{}")).status_code == 415
    assert (
        await client.post("/invocations", json={"prompt": "a", "model": "none"})
    ).status_code == 404
    engine.state = "loading"
    assert (await client.post("/invocations", json={"prompt": "hi"})).status_code == 503


@pytest.mark.parametrize(
    ("task", "body", "path"),
    [
        ("embed", {"input": "hi"}, "/v1/embeddings"),
        ("embed", {"messages": USER}, "/v1/embeddings"),
        ("embed", {"text_1": "a", "text_2": "b"}, "/score"),
        ("embed", {"queries": "a", "documents": ["b"]}, "/score"),
        ("embed", {"query": "a", "documents": ["b"]}, "/rerank"),
        ("classify", {"input": "hi"}, "/classify"),
        ("classify", {"data_1": "a", "data_2": "b"}, "/score"),
        ("classify", {"query": "a", "documents": ["b"]}, "/rerank"),
    ],
)
async def test_shapes_of_pooling_models(
    client: httpx.AsyncClient, engine: FakeEngine, task: str, body: dict[str, Any], path: str
) -> None:
    """The route itself refuses in the same words when the engine does."""
    engine.pooler = PoolerSpec(task, "Bert", True, "mean")  # type: ignore[assignment]
    engine.refuse = UnsupportedTask("not today")
    replies = [await client.post(route, json=body) for route in (path, "/invocations")]
    assert replies[0].status_code == 400
    assert replies[0].content == replies[1].content
    assert (await client.post("/invocations", json={"prompt": "hi"})).status_code == 400


def test_each_shape_is_a_route_with_the_same_handler() -> None:
    assert {shape.path for shape in SHAPES} <= set(ROUTES)
    assert all(ROUTES.get(shape.path).handler is shape.handler for shape in SHAPES)
    taken = {ROUTES.get(shape.path).body for shape in SHAPES}
    assert taken == set(ROUTES.get("/invocations").bodies)


async def test_a_reply_can_be_resumed(state: ServerState) -> None:
    app, body = build_app(state), {"prompt": "hi", "stream": True}
    first = Caller(app, "POST", "/invocations", body, {"x-resumable": "true"})
    await first.task
    again = Caller(app, "GET", f"/v1/streams/{first.stream_id}")
    await again.task
    assert again.data == first.data and b"[DONE]" in first.data


async def test_ping_answers_get_and_post(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for method in ("GET", "POST"):
        assert (await client.request(method, "/ping")).status_code == 200
    engine.state = "dead"
    for method in ("GET", "POST"):
        assert (await client.request(method, "/ping")).status_code == 503
