"""`use_beam_search` over a fake engine: what is refused, and what each round asks of the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from asgi_caller import Caller
from fake_engine import FakeEngine
from quire.errors import TooManyRequests
from quire.serving import deadline as deadlines
from quire.serving.app import build_app
from quire.serving.server_state import ServerState

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}
BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 4}


@pytest.mark.parametrize("path", BODIES)
async def test_rounds_of_one_token(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    reply = await client.post(
        path, json={**BODIES[path], **BEAMS, "priority": 0, "cache_salt": "s"}
    )
    body = reply.json()
    assert reply.status_code == 200, body
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 12 and body["seed"] == 0
    params = [one[1] for one in engine.submitted]
    assert all(one.max_tokens == 1 and one.greedy and one.logprobs == 6 for one in params)
    assert engine.continued == [False] + 9 * [True], "1 + 3 + 3 + 3 requests"
    assert {one[4] for one in engine.submitted} == {"s"}
    names = [one[2] for one in engine.submitted]
    assert len(set(names)) == len(names) and all(body["id"] in name for name in names)


async def test_priority_client_and_deadline_are_passed_on(state: ServerState) -> None:
    engine = FakeEngine(policy="priority")
    app = build_app(ServerState(state.config, engine))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost"
    ) as client:
        reply = await client.post(
            TEXT,
            json={"prompt": ["a", "b"], **BEAMS, "priority": -5, "user": "me"},
            headers={"X-Request-Deadline-Ms": "60000", "traceparent": "00-1-2-03"},
        )
    assert reply.status_code == 200, reply.json()
    assert len(reply.json()["choices"]) == 6
    assert {one[3] for one in engine.submitted} == {-5} and set(engine.clients) == {"me"}
    waits = [one for one in engine.max_waits if one is not None]
    assert len(waits) == len(engine.submitted) == 2 + 6 * 3 and max(waits) <= 60
    assert engine.trace_headers == {"traceparent": "00-1-2-03"}


async def test_a_refused_first_round_is_the_reply(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.refuse = TooManyRequests("The queue is full.", retry_after=3)
    reply = await client.post(TEXT, json={"prompt": "hi", **BEAMS})
    assert reply.status_code == 429 and reply.headers["retry-after"] == "3"


async def test_a_fault_of_the_engine_is_an_error(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.break_after = 0
    reply = await client.post(TEXT, json={"prompt": "hi", **BEAMS})
    assert reply.status_code == 500 and "secret" not in reply.text
    assert not engine._tasks, "the other sequences were ended"


async def test_a_client_that_leaves_ends_all(state: ServerState, engine: FakeEngine) -> None:
    app = build_app(state)
    caller = Caller(app, "POST", TEXT, {"prompt": ["a", "b"], **BEAMS, "max_tokens": 100})
    while len(engine.submitted) < 20:
        await asyncio.sleep(0)
    engine.hang.clear()
    while len(engine._tasks) < 6:
        await asyncio.sleep(0)
    count = len(engine.submitted)
    caller.gone.set()
    await caller.task
    assert not engine._tasks and len(engine.aborted) == 6
    assert len(engine.submitted) == count and not state.active_ids and not state.in_flight


async def test_at_the_deadline_the_best_so_far_is_returned(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = deadlines.Deadline.watch

    def watched(self: Any, engine: Any, ids: Any, streams: Any) -> Any:
        found = watch(self, engine, ids, streams)
        if "-2-" in ids[0]:  # the third round
            self._expire(engine, ids)
        return found

    monkeypatch.setattr(deadlines.Deadline, "watch", watched)
    headers = {"X-Request-Deadline-Ms": "60000"}
    engine.delay = 0.001
    reply = await client.post(
        TEXT, json={"prompt": "hi", **BEAMS, "max_tokens": 50}, headers=headers
    )
    assert reply.status_code == 200, reply.json()
    choices = reply.json()["choices"]
    assert [one["finish_reason"] for one in choices] == ["abort"] * 3
    assert reply.json()["usage"]["completion_tokens"] == 6, "two rounds"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"stream": True}, "stream", "which output is best is known only at the end"),
        ({"n": 11}, "n", r"n must be at most 10 for beam search"),
        ({"n": 0}, "n", "n must be at least 1, got 0"),
        ({"length_penalty": 10.5}, "length_penalty", "must be a number in [-10, 10], got 10.5"),
        ({"response_format": {"type": "json_object"}}, "response_format", "beams have no grammars"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "beams have no grammars"),
        ({"guided_choice": ["a"]}, "guided_choice", "beams have no grammars"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "not supported with use_beam_search"),
        ({"presence_penalty": 1}, "presence_penalty", "is not supported with use_beam_search"),
        ({"logit_bias": {"1": 2}}, "logit_bias", "is not supported with use_beam_search"),
        ({"bad_words": ["a"]}, "bad_words", "is not supported with use_beam_search"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids", "is not supported with use_beam_search"),
        ({"min_tokens": 2}, "min_tokens", "is not supported with use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "is not supported with use_beam_search"),
        ({"use_beam_search": False, "n": 1, "length_penalty": 2}, "length_penalty",
         "length_penalty needs use_beam_search to be true, got 2.0"),
    ],
)  # fmt: skip
async def test_what_does_not_go_with_it_is_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, given: dict[str, Any], param: str,
    said: str,
) -> None:  # fmt: skip
    reply = await client.post(path, json={**BODIES[path], **BEAMS, **given})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param, error
    assert said in error["message"] and not engine.submitted


@pytest.mark.parametrize("path", BODIES)
async def test_what_asks_for_nothing_goes_with_it(client: httpx.AsyncClient, path: str) -> None:
    neutral = {
        "stream": False, "presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {},
        "min_tokens": 0, "response_format": {"type": "text"}, "early_stopping": False,
        "temperature": 0, "top_p": 1, "seed": 3, "length_penalty": 1.0,
    }  # fmt: skip
    reply = await client.post(path, json={**BODIES[path], **BEAMS, **neutral})
    assert reply.status_code == 200, reply.json()
    assert reply.json()["seed"] == 3


async def test_forced_calls_are_refused(client: httpx.AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {**BODIES[CHAT], **BEAMS, "tools": [tool], "tool_choice": "required"}
    reply = await client.post(CHAT, json=body)
    assert reply.status_code == 400


@pytest.mark.parametrize("path", BODIES)
async def test_a_search_cannot_be_rendered(client: httpx.AsyncClient, path: str) -> None:
    reply = await client.post(f"{path}/render", json={**BODIES[path], **BEAMS})
    assert reply.status_code == 400
    assert "use_beam_search cannot be rendered" in reply.json()["error"]["message"]


async def test_prompts_times_width_are_limited(client: httpx.AsyncClient) -> None:
    reply = await client.post(TEXT, json={"prompt": ["a"] * 400, **BEAMS})
    assert reply.status_code == 400
    assert (
        "at most 1024 completions (prompts times n; --max-n-sequences), got 1200"
        in reply.json()["error"]["message"]
    )
