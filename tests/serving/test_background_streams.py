"""Responses made in the background as a stream: clients leave and come back to the same events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

import toy_parsers as toys
from asgi_caller import Caller
from fake_engine import FakeEngine
from named_events import events, scripted_server
from quire.errors import TooManyRequests
from quire.serving.app import build_app
from quire.serving.server_state import ServerState

BODY = {"input": "hi", "background": True, "stream": True}
TOOL = {"type": "function", "name": "map", "parameters": {"type": "object", "properties": {}}}


def numbers(found: list[dict[str, Any]]) -> list[int]:
    return [event["sequence_number"] for event in found]


def answers(response: dict[str, Any]) -> list[dict[str, Any]]:
    """An output for each call of a tool."""
    calls = [item["call_id"] for item in response["output"] if "call_id" in item]
    return [{"type": "function_call_output", "call_id": c, "output": c} for c in calls]


async def retrieved(client: httpx.AsyncClient, name: str, query: str = "") -> str:
    reply = await client.get(f"/v1/responses/{name}?stream=true{query}")
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return reply.text


async def test_the_golden_sequence(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    reply = await client.post("/v1/responses", json=BODY)
    streamed = events(reply.text)
    plain = events((await client.post("/v1/responses", json=BODY | {"background": False})).text)
    kinds = [event["type"] for event in streamed]
    assert kinds == ["response.created", "response.queued"] + [e["type"] for e in plain][1:]
    assert numbers(streamed) == list(range(len(streamed)))
    assert [event["response"]["status"] for event in streamed[:3]] == [
        "queued", "queued", "in_progress",
    ]  # fmt: skip
    last = streamed[-1]["response"]
    assert last["background"] and last["status"] == "completed"
    kept = (await client.get(f"/v1/responses/{last['id']}")).json()
    assert kept == last


async def test_who_retrieves_it_gets_the_same_bytes(client: httpx.AsyncClient) -> None:
    whole = (await client.post("/v1/responses", json=BODY)).text
    streamed = events(whole)
    name = streamed[0]["response"]["id"]
    assert await retrieved(client, name) == whole
    frames = [frame + "\n\n" for frame in whole.split("\n\n")[:-1]]
    for after in (0, 1, len(frames) - 2, len(frames) - 1):
        rest = await retrieved(client, name, f"&starting_after={after}")
        assert rest == "".join(frames[after + 1 :])


async def test_it_goes_on_when_its_client_leaves(state: ServerState, engine: FakeEngine) -> None:
    app = build_app(state)
    engine.hang.clear()
    first = Caller(app, "POST", "/v1/responses", BODY, cut=1)
    await first.task
    assert first.status == 200 and not first.is_complete
    (name,) = state.active_ids
    reader = Caller(app, "GET", f"/v1/responses/{name}?stream=true")
    later = Caller(app, "GET", f"/v1/responses/{name}?stream=true&starting_after=1")
    while not (reader.data and later.data):
        await asyncio.sleep(0)
    assert not reader.is_complete and state.answering == 1, "a drain waits for it"
    engine.hang.set()
    await asyncio.gather(reader.task, later.task)
    assert reader.is_complete and reader.data.endswith(later.data)
    streamed = events(reader.data.decode())
    assert streamed[-1]["type"] == "response.completed"
    assert numbers(events(later.data.decode())) == numbers(streamed)[2:]
    assert not engine.aborted and state.answering == state.in_flight == 0


@pytest.mark.parametrize("method", ["cancel", "delete"])
async def test_readers_are_told_that_it_was_ended(
    state: ServerState, engine: FakeEngine, method: str
) -> None:
    app = build_app(state)
    engine.hang.clear()
    reader = Caller(app, "POST", "/v1/responses", BODY)
    while not reader.data:
        await asyncio.sleep(0)
    (name,) = state.active_ids
    path = f"/v1/responses/{name}"
    ended = Caller(
        app, *(("POST", path + "/cancel", {}) if method == "cancel" else ("DELETE", path))
    )
    await asyncio.gather(reader.task, ended.task)
    last = events(reader.data.decode())[-1]
    assert last["type"] == "response.cancelled" and last["response"]["status"] == "cancelled"
    again = Caller(app, "GET", path + "?stream=true")
    await again.task
    assert again.status == (200 if method == "cancel" else 404)
    assert method == "delete" or again.data == reader.data


async def test_failures(client: httpx.AsyncClient, engine: FakeEngine, state: ServerState) -> None:
    engine.break_after = 1
    streamed = events((await client.post("/v1/responses", json=BODY)).text)
    last = streamed[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(streamed)
    engine.refuse = TooManyRequests("full")
    assert (await client.post("/v1/responses", json=BODY)).status_code == 429
    assert len(state.responses) == 1 and state.answering == 0


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=yes", "stream"),
        ("starting_after=0", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=99", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&starting_after=\N{SUPERSCRIPT TWO}", "starting_after"),
        ("include_obfuscation=true", "include_obfuscation"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, query: str, param: str) -> None:
    made = events((await client.post("/v1/responses", json=BODY)).text)[0]["response"]["id"]
    reply = await client.get(f"/v1/responses/{made}?{query}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param, reply.text


async def test_others_are_retrieved_whole(client: httpx.AsyncClient) -> None:
    for more in ({"stream": False}, {"background": False, "stream": False}):
        made = (await client.post("/v1/responses", json=BODY | more)).json()
        reply = await client.get(f"/v1/responses/{made['id']}?stream=true")
        assert reply.status_code == 400 and "background and stream" in reply.text


async def test_events_count_to_the_size_of_what_is_kept(
    client: httpx.AsyncClient, state: ServerState
) -> None:
    plain = {"input": "hi", "background": False}
    made = (await client.post("/v1/responses", json=plain)).json()["id"]
    text = (await client.post("/v1/responses", json=BODY)).text
    large = events(text)[0]["response"]["id"]
    sizes = [state.responses.get(b"", name).size for name in (made, large)]
    assert sizes[1] > sizes[0] + len(text) - 100


async def test_three_turns_with_tools_of_streamed_responses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each goes on from the one before it, as soon as its last event was read, in the background or
    not; the input items of each are its own."""
    client, core, _ = scripted_server(monkeypatch, [toys.TEXT, toys.TEXT, "fine"], ["toy"])
    async with client:
        turns: list[dict[str, Any]] = []
        items: Any = "hi"
        for i in range(3):
            body = BODY | {"input": items, "tools": [TOOL], "background": i != 1}
            if turns:
                body["previous_response_id"] = turns[-1]["id"]
            streamed = events((await client.post("/v1/responses", json=body)).text)
            turns.append(streamed[-1]["response"])
            items = answers(turns[-1])
            assert bool(items) == (i < 2)
        everything: list[Any] = [{"role": "user", "content": "hi"}]
        for turn in turns[:2]:
            everything += turn["output"]
            calls = [item["call_id"] for item in turn["output"] if "call_id" in item]
            everything += [
                {"type": "function_call_output", "call_id": c, "output": c} for c in calls
            ]
        reply = await client.post("/v1/responses", json={"input": everything, "tools": [TOOL]})
        assert reply.status_code == 200
        for turn, kind in zip(turns, ("message", *["function_call_output"] * 2), strict=True):
            listed = (await client.get(f"/v1/responses/{turn['id']}/input_items")).json()
            assert {item["type"] for item in listed["data"]} == {kind}
    prompts = [request.prompt_token_ids for request in core.sent]
    assert prompts[2] == prompts[3]
