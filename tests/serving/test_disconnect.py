"""A caller who goes away frees the engine at once, streaming or not; and raw ASGI behaviour."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fake_engine import FakeEngine, FakeStream
from patience import PATIENCE
from quire.serving.app import build_app
from quire.serving.server_state import ServerState


class Caller:
    """A caller on bare ASGI that can hang up."""

    def __init__(self, state: ServerState, path: str, body: dict[str, Any]) -> None:
        self.received: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.hangs_up_at_end = False
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
        }
        self.task = asyncio.ensure_future(build_app(state)(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.received.append(message)
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if self.hangs_up_at_end and last:
            self.gone.set()
        await self.reads.wait()


BODIES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, 1),
    ("/v1/completions", {"prompt": "hi"}, 1),
    ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "requests"), BODIES)
async def test_hanging_up_aborts(
    state: ServerState,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
    requests: int,
    stream: bool,
) -> None:
    engine.hang.clear()
    caller = Caller(state, path, {**body, "stream": stream})
    async with asyncio.timeout(PATIENCE):
        while len(engine.submitted) < requests:
            await asyncio.sleep(0.001)
        assert state.in_flight == 1 and not engine.aborted
        caller.gone.set()
        await caller.task
    assert len(engine.aborted) == requests
    assert (state.in_flight, state.active_ids) == (0, set())
    assert len(caller.received) == (1 if stream else 0), "nothing is sent to nobody"


async def test_hanging_up_in_the_middle_of_a_stream(state: ServerState, engine: FakeEngine) -> None:
    engine.delay = 0.01
    engine.reply = "x" * 100
    path, body, _ = BODIES[0]
    caller = Caller(state, path, {**body, "stream": True})
    async with asyncio.timeout(PATIENCE):
        while len(caller.received) < 5:
            await asyncio.sleep(0.001)
        caller.gone.set()
        await caller.task
    assert len(engine.aborted) == 1


async def test_a_finished_request_is_not_aborted(state: ServerState, engine: FakeEngine) -> None:
    path, body, _ = BODIES[0]
    for stream in (False, True):
        caller = Caller(state, path, {**body, "stream": stream})
        await caller.task
        assert caller.received[-1].get("more_body", False) is False
    assert engine.aborted == []


async def test_cancelling_the_server_task_aborts(state: ServerState, engine: FakeEngine) -> None:
    engine.hang.clear()
    path, body, _ = BODIES[0]
    caller = Caller(state, path, body)
    while not engine.submitted:
        await asyncio.sleep(0.001)
    caller.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller.task
    assert len(engine.aborted) == 1


async def test_a_disconnect_before_the_body_ends(state: ServerState, engine: FakeEngine) -> None:
    caller = Caller(state, "/v1/completions", {})
    caller._body = None
    caller.gone.set()
    await caller.task
    assert caller.received == [] and engine.submitted == []


async def test_a_slow_reader_holds_back_only_itself(state: ServerState, engine: FakeEngine) -> None:
    engine.reply = "x" * 50
    path, body, _ = BODIES[0]
    slow = Caller(state, path, {**body, "stream": True})
    slow.reads.clear()
    quick = Caller(state, path, {**body, "stream": True})
    async with asyncio.timeout(PATIENCE):
        await quick.task
        assert not slow.task.done() and len(slow.received) == 1
        slow.reads.set()
        await slow.task


async def test_a_complete_reply_is_cleaned_up_in_peace(
    state: ServerState, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers report a disconnect as soon as a reply is complete."""
    closed = []

    async def slow_close(self: FakeStream) -> None:
        await asyncio.sleep(0.02)
        closed.append(self.request_id)

    monkeypatch.setattr(FakeStream, "aclose", slow_close)
    path, body, _ = BODIES[0]
    for stream in (False, True):
        caller = Caller(state, path, {**body, "stream": stream})
        caller.hangs_up_at_end = True
        await caller.task
    assert len(closed) == 2
