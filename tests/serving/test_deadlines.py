"""`X-Request-Deadline-Ms`: what cannot begin in time is refused, what has nothing by then is an
error, and what runs is returned as far as it is. The deadline is made to pass, not waited for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine
from quire.errors import DeadlineUnreachable
from quire.serving import deadline as deadlines

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {TEXT: {"prompt": "hi"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}
HEADERS = {"X-Request-Deadline-Ms": "60000"}


@pytest.fixture
def expire(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lets all deadlines pass."""
    made: list[Any] = []
    watch = deadlines.Deadline.watch

    def kept(self: Any, engine: Any, request_ids: Any, streams: Any) -> Any:
        found = watch(self, engine, request_ids, streams)
        made.append((self, engine, request_ids, found[0]))
        return found

    monkeypatch.setattr(deadlines.Deadline, "watch", kept)

    async def now() -> None:
        while not made:
            await asyncio.sleep(0)
        for one, engine, request_ids, _ in made:
            one._expire(engine, request_ids)

    now.made = made  # type: ignore[attr-defined]
    return now


@pytest.mark.parametrize(
    "value", ["0", "-1", "1.5", "x", "", "1e3", "86400001", "9" * 500, "\u00b2".encode()]
)
@pytest.mark.parametrize("path", list(BODIES))
async def test_bad_values(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, value: Any
) -> None:
    reply = await client.post(path, json=BODIES[path], headers={"X-Request-Deadline-Ms": value})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "X-Request-Deadline-Ms"
    assert "must be an integer from 1 to 86400000, got " in error["message"]
    assert not engine.submitted and len(error["message"]) < 200


async def test_the_engine_hears_how_long_the_caller_waits(
    client: httpx.AsyncClient, engine: FakeEngine, expire: Any
) -> None:
    plain = await client.post(TEXT, json=BODIES[TEXT])
    timed = await client.post(TEXT, json=BODIES[TEXT], headers=HEADERS)
    assert plain.json()["choices"] == timed.json()["choices"]
    assert engine.max_waits[0] is None
    assert 0 < engine.max_waits[1] <= 60
    [(_, _, _, timer)] = expire.made
    assert timer.cancelled() and engine.aborted == []


async def test_a_refusal_says_both_numbers_and_when_to_try_again(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.refuse = DeadlineUnreachable(12.34, 5.0)
    reply = await client.post(TEXT, json=BODIES[TEXT], headers=HEADERS)
    assert (reply.status_code, reply.headers["retry-after-ms"]) == (503, "7340")
    error = reply.json()["error"]
    assert error["code"] == "deadline_unreachable"
    assert "about 12.3 s for its turn, and its deadline is in 5.0 s" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]])
async def test_what_has_nothing_by_then_is_an_error(
    client: httpx.AsyncClient, engine: FakeEngine, expire: Any, stream: bool, prompts: list[str]
) -> None:
    engine.hang.clear()
    body = {"prompt": prompts, "stream": stream}
    asking = asyncio.ensure_future(client.post(TEXT, json=body, headers=HEADERS))
    await expire()
    reply = await asking
    if stream:
        error = next(json.loads(f[6:]) for f in reply.text.split("\n\n") if '"error"' in f)["error"]
    else:
        assert reply.status_code == 504
        error = reply.json()["error"]
    assert error["code"] == "deadline_exceeded" and "60000 ms" in error["message"]
    assert len(engine.aborted) == len(prompts), "the engine counts an end of each"


async def test_what_runs_is_returned_as_far_as_it_is(
    client: httpx.AsyncClient, engine: FakeEngine, expire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = engine.output

    def partial(stream: Any, prompt: Any, params: Any, span: Any, reason: Any, *more: Any) -> Any:
        return output(stream, prompt, params, (0, 2) if reason == "abort" else span, reason, *more)

    monkeypatch.setattr(engine, "output", partial)
    engine.hang.clear()
    asking = asyncio.ensure_future(client.post(TEXT, json=BODIES[TEXT], headers=HEADERS))
    await expire()
    reply = await asking
    assert reply.status_code == 200
    [choice] = reply.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("He", "abort")


async def test_a_deadline_that_passed_before_submission() -> None:
    deadline = deadlines.Deadline(1)
    deadline._at -= 1.0
    with pytest.raises(deadlines.DeadlineExceeded, match="of 1 ms"):
        deadline.left()
