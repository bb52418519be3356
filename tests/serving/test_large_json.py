"""Replies that are made in slices have the bytes of those that are made in one go."""

from __future__ import annotations

import re
from typing import Any

import httpx
import msgspec
import pytest

from fake_engine import FakeEngine
from quire.config import ServerConfig
from quire.core.batch import TokenLogprobs
from quire.engine.frontend.prompt_logprobs import PromptLogprobs, candidates, pack
from quire.serving import large_json
from quire.serving.app import build_app
from quire.serving.large_json import Splices, items, joined, sendable
from quire.serving.openai import completion_reply
from quire.serving.server_state import ServerState

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a b c d"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt": (TEXT, {"prompt": "a b c d", "prompt_logprobs": 2, "n": 3}),
    "echo": (TEXT, {"prompt": ["a b c d", "e f"], "echo": True, "logprobs": 2, "n": 2}),
    "both": (TEXT, {"prompt": "a b", "echo": True, "logprobs": 2, "prompt_logprobs": 1}),
    "output": (TEXT, {"prompt": "a b c d", "logprobs": 2, "n": 2}),
    "chat": (CHAT, {"messages": MESSAGES, "prompt_logprobs": 2, "n": 2}),
    "chat output": (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
}


async def reply(engine: FakeEngine, path: str, body: dict[str, Any]) -> bytes:
    state = ServerState(ServerConfig(), engine)
    transport = httpx.ASGITransport(app=build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        common = {"seed": 1, "temperature": 1, "max_tokens": 6, "request_id": "same"}
        response = await client.post(path, json=common | body)
        assert response.status_code == 200, response.text
        created = response.content.partition(b'"created":')[2].partition(b",")[0]
        return response.content.replace(created, b"0")


def by_choice(events: bytes) -> dict[int, list[bytes]]:
    """Events of a stream, those of each choice in turn: whose comes first is a matter of time."""
    found: dict[int, list[bytes]] = {}
    for event in events.split(b"\n\n"):
        index = re.search(rb'"index":(\d+)', event)
        plain = event.replace(b',"seed":1', b"")  # the first event of all has it
        found.setdefault(int(index[1]) if index else -1, []).append(plain)
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BODIES)
async def test_slices_change_no_byte(
    name: str, stream: bool, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = BODIES[name]
    whole = await reply(engine, path, body | {"stream": stream})
    assert b"logprob" in whole
    for module in (large_json, completion_reply):
        monkeypatch.setattr(module, "SLICE", 3)
        monkeypatch.setattr(module, "ONE_GO", 100)
    monkeypatch.setattr(large_json, "CHARACTERS", 10_000)  # on threads
    sliced = await reply(engine, path, body | {"stream": stream})
    if stream:
        assert sliced.count(b'"seed":1') == whole.count(b'"seed":1') == 1
        assert by_choice(sliced) == by_choice(whole)
    else:
        assert sliced == whole


@pytest.mark.parametrize("sizes", [[], [0], [5], [10], [11], [3, 3, 3, 3], [25, 1], [1, 20, 30]])
def test_parts_are_small_and_lose_nothing(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_json, "ONE_GO", 10)
    pieces = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    parts = list(sendable(pieces))
    assert b"".join(parts) == b"".join(pieces)
    assert all(len(part) <= 10 for part in parts)


def test_arrays_are_those_of_the_encoder() -> None:
    for parts in ([], [[]], [[1]], [[1, 2], [], [{"a": "\0"}]]):
        found = b"".join(joined(items(parts), items([[7]])))
        assert found == msgspec.json.encode([*(x for part in parts for x in part), 7])


def test_values_stand_where_their_marks_were() -> None:
    splices = Splices()
    for _ in range(2):  # marks end with what they were in
        body = {"a": splices.raw([b"[1,", b"2]"]), "b": "\0", "c": splices.raw([b"{}"])}
        found = splices.fill(msgspec.json.encode(body))
        assert msgspec.json.decode(b"".join(found)) == {"a": [1, 2], "b": "\0", "c": {}}


def test_positions_are_made_when_they_are_read() -> None:
    spelled: list[int] = []

    def spell(token: int) -> str:
        spelled.append(token)
        return f"<{token}>"

    raw = [None, TokenLogprobs([5, 5, 9], [-1.0, -1.0, -2.0], 7)]
    lazy = PromptLogprobs([None if p is None else pack(p) for p in raw], spell)
    assert len(lazy) == 2 and lazy[0] is None and not spelled
    assert lazy[1] == candidates(raw[1], spell) and list(lazy[1] or ()) == [5, 9]
    assert lazy == [None, lazy[1]] and lazy[0:1] == [None] and list(lazy) == lazy[:]
    assert spelled
