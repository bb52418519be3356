"""What a drain waits for, what becomes of the rest, and what the refused are told."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine, FakeTokenizer
from patience import PATIENCE
from quire.config import ServerConfig
from quire.serving.app import build_app
from quire.serving.drain import drain
from quire.serving.prompts import INLINE_CHARACTERS
from quire.serving.server_state import ServerState
from quire.utils.timing import ManualClock

TEXT = "/v1/completions"


class SlowTokenizer(FakeTokenizer):
    """Tokenises when it is told to."""

    longest_token = INLINE_CHARACTERS
    # so that a long text may be worth tokenising

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        return [1]

    def encode_within(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return self.encode(text)


async def tokenising(
    client: httpx.AsyncClient, engine: FakeEngine
) -> tuple[SlowTokenizer, asyncio.Task[httpx.Response]]:
    """A request that has been accepted and is not yet known to the engine."""
    slow = engine.tokenizer = SlowTokenizer()
    body = {"prompt": "x" * (INLINE_CHARACTERS + 1)}
    asked = asyncio.ensure_future(client.post(TEXT, json=body))
    assert await asyncio.to_thread(slow.begun.wait, PATIENCE), asked
    return slow, asked


async def test_a_request_that_is_being_tokenised_is_waited_for(
    client: httpx.AsyncClient, state: ServerState, engine: FakeEngine
) -> None:
    slow, asked = await tokenising(client, engine)
    drained = asyncio.ensure_future(drain(state, lambda: False, PATIENCE, asyncio.Event()))
    await asyncio.sleep(0)
    assert (state.in_flight, state.answering) == (0, 1)
    refused = await client.post(TEXT, json={"prompt": "a"})
    assert refused.status_code == 503 and refused.headers["connection"] == "close"
    slow.go_on.set()
    assert (await asked).status_code == 200
    await drained
    assert state.answering == 0


async def test_one_that_comes_out_of_the_tokeniser_too_late_is_told(
    client: httpx.AsyncClient, state: ServerState, engine: FakeEngine
) -> None:
    slow, asked = await tokenising(client, engine)
    await drain(state, lambda: False, 0, asyncio.Event())
    slow.go_on.set()
    error = (await asked).json()["error"]
    assert error["code"] == "shutting_down" and "before this request" in error["message"]
    assert not engine.submitted


async def test_bytes_on_their_way_are_waited_for(state: ServerState) -> None:
    asked = iter([True, True, True, False, False])
    await drain(state, lambda: next(asked), PATIENCE, asyncio.Event())
    assert list(asked) == []


async def test_nobody_is_counted_twice_or_for_ever(
    client: httpx.AsyncClient, state: ServerState, engine: FakeEngine
) -> None:
    for body in ({"prompt": "a"}, {"prompt": 5}, {}, {"prompt": "a", "stream": True}):
        await client.post(TEXT, json=body)
        assert state.answering == 0


def later(percent: int = 0, **change: Any) -> tuple[ServerState, ManualClock]:
    clock = ManualClock(1000.0)
    engine = FakeEngine()
    state = ServerState(ServerConfig(), engine, clock)
    if percent:
        engine.state, engine.progress = "loading", ("weights", percent, 100)
    return state, clock


async def retry_after(state: ServerState) -> tuple[str, str]:
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        reply = await client.post(TEXT, json={"prompt": "a"})
    assert reply.status_code == 503
    return reply.headers["retry-after"], reply.headers["retry-after-ms"]


async def test_the_refused_are_told_when_the_address_may_answer_again() -> None:
    """What is left of the drain, and a start like the last one."""
    state, clock = later()
    clock.advance(3.25)
    state.mark_started()
    clock.advance(60)
    state.begin_drain(25)
    state.begin_drain(999)  # once
    assert await retry_after(state) == ("29", "28250")
    clock.advance(20)
    assert await retry_after(state) == ("9", "8250")
    clock.advance(20)
    assert await retry_after(state) == ("4", "3250")


@pytest.mark.parametrize(
    ("percent", "passed", "told"),
    [(25, 5, "15"), (50, 5, "5"), (99, 5, "1"), (1, 5, "60")],
)
async def test_while_loading_by_its_progress(percent: int, passed: float, told: str) -> None:
    state, clock = later(percent)
    clock.advance(passed)
    assert (await retry_after(state))[0] == told


async def test_refusals_are_counted_by_code_and_probes_are_not(
    client: httpx.AsyncClient, state: ServerState
) -> None:
    state.begin_drain(25)
    for _ in range(2):
        await client.post(TEXT, json={"prompt": "a"})
    for path in ("/readyz", "/health"):
        assert (await client.get(path)).status_code == 503
    lines = state.http_text.render().decode().splitlines()
    assert 'quire:http_unavailable_total{code="shutting_down"} 2.0' in lines
