"""Render routes give what `/inference/v1/generate` takes, and both together the same tokens."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine
from named_events import scripted_server

TURN = [{"role": "user", "content": "hi"}]
RENDERED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": TURN, "temperature": 0.5, "max_tokens": 9, "seed": 3}),
    ("/v1/chat/completions", {"messages": TURN, "logit_bias": {"65": 2}, "stop": ["x"]}),
    ("/v1/completions", {"prompt": "hi", "logprobs": 2, "top_k": 5}),
    ("/v1/messages", {"messages": TURN, "max_tokens": 9, "stop_sequences": ["q"]}),
]


@pytest.mark.parametrize(("path", "body"), RENDERED, ids=lambda value: str(value)[:30])
async def test_what_is_rendered_is_what_would_have_run(
    path: str, body: dict[str, Any], client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    reply = await client.post(f"{path}/render", json=body)
    assert reply.status_code == 200, reply.text
    assert not engine.submitted, "nothing is computed"
    found = reply.json()
    (one,) = found if isinstance(found, list) else [found]
    assert (await client.post(path, json=body)).status_code == 200
    assert (await client.post("/inference/v1/generate", json=one)).status_code == 200
    (prompt, params, *_), (again, others, *_) = engine.submitted
    assert (again, others) == (prompt, params) and one["token_ids"] == prompt


async def test_each_text_is_a_request_of_its_own(client: httpx.AsyncClient) -> None:
    found = (await client.post("/v1/completions/render", json={"prompt": ["a", "b"]})).json()
    assert [one["token_ids"][-1] for one in found] == [97, 98]
    assert len({one["request_id"] for one in found}) == 2


async def test_a_stream_has_the_tokens_of_the_whole_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    client, core, _ = scripted_server(monkeypatch, ["one two three"])
    body = {"token_ids": [300, 301], "sampling_params": {"max_tokens": 99, "logprobs": 1, "n": 2}}
    async with client:
        whole = (await client.post("/inference/v1/generate", json=body)).json()
        reply = await client.post("/inference/v1/generate", json=body | {"stream": True})
    frames = reply.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    folded: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        made = folded.setdefault(choice["index"], choice | {"token_ids": [], "logprobs": []})
        made["token_ids"] += choice["token_ids"]
        made["logprobs"] += choice["logprobs"]["content"] if choice["logprobs"] else []
        made |= {k: choice[k] for k in ("finish_reason", "stop_reason")}
    for choice in whole["choices"]:
        choice["logprobs"] = choice["logprobs"]["content"]
    assert [folded[i] for i in range(2)] == whole["choices"]
    assert whole["choices"][0]["token_ids"][:-1] == core.texts[0]
    assert chunks[-1]["usage"] == whole["usage"] and whole["usage"]["prompt_tokens"] == 2


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"token_ids": [300000]}, "token_ids", "300000"),
    ({"token_ids": "hi"}, "token_ids", "array"),
    ({"token_ids": []}, "token_ids", "empty"),
    ({"sampling_params": None}, "sampling_params", "object"),
    ({"sampling_params": {"temperature": 9}}, "sampling_params.temperature", "got 9"),
    ({"sampling_params": {"temperature": "9"}}, "sampling_params.temperature", "'9'"),
    ({"sampling_params": {"temprature": 1}}, "sampling_params.temprature", "temperature"),
    ({"sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias", "x"),
    ({"sampling_params": {"output_kind": 1}}, "sampling_params.output_kind", "Unknown field"),
    ({"features": {"a": 1}}, "features", "text only"),
]


@pytest.mark.parametrize(("body", "param", "words"), WRONG, ids=lambda value: str(value)[:40])
async def test_what_is_wrong_is_named(
    body: dict[str, Any], param: str, words: str, client: httpx.AsyncClient
) -> None:
    given = {"token_ids": [65], "sampling_params": {}} | body
    reply = await client.post("/inference/v1/generate", json=given)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and words in error["message"], error
