"""`--enable-per-request-metrics`: timings in whole replies, and in the chunk with the usage."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine
from quire.config import ServerConfig
from quire.outputs import RequestMetrics
from quire.serving.app import build_app
from quire.serving.request_metrics import request_metrics
from quire.serving.server_state import ServerState

TIMES = RequestMetrics(
    arrival_time=0.5,
    queued_ts=1.0,
    scheduled_ts=1.5,
    first_token_ts=2.0,
    last_token_ts=3.0,
    num_generation_tokens=10,
)
TOLD = {
    "time_to_first_token_ms": 500.0,
    "generation_time_ms": 1000.0,
    "queue_time_ms": 500.0,
    "mean_itl_ms": pytest.approx(1000 / 9),
    "tokens_per_second": pytest.approx(10 / 1.5),
}
NOTHING = dict.fromkeys(TOLD)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOKENS = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9}}
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "hi"}),
    ("/inference/v1/generate", TOKENS),
]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
async def timed(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    engine.times = TIMES
    state = ServerState(ServerConfig(enable_per_request_metrics=True), engine)
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as made:
        yield made


async def chunks(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    text = (await client.post(path, json=body)).text
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_whole_reply(timed: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    assert (await timed.post(path, json=body)).json()["metrics"] == TOLD


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_stream_tells_them_with_the_usage(
    timed: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    own = {"stream": True} if path.startswith("/inference") else USAGE
    *others, last = await chunks(timed, path, body | own)
    assert last["metrics"] == TOLD and last["usage"]
    assert not any("metrics" in chunk for chunk in others)


async def test_no_usage_no_metrics(timed: httpx.AsyncClient) -> None:
    for path, body in BODIES[:2]:
        found = await chunks(timed, path, body | {"stream": True})
        assert not any("metrics" in chunk for chunk in found)


async def test_requests_for_several_completions_have_none(timed: httpx.AsyncClient) -> None:
    for path, body in (
        ("/v1/chat/completions", CHAT | {"n": 2}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
    ):
        assert "metrics" not in (await timed.post(path, json=body)).json()
        assert "metrics" not in (await chunks(timed, path, body | USAGE))[-1]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_they_are_off_by_default(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.times = TIMES
    assert "metrics" not in (await client.post(path, json=body)).json()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, TOLD),
        ({"num_generation_tokens": 1}, TOLD | {"mean_itl_ms": None, "tokens_per_second": 1 / 1.5}),
        (
            {"scheduled_ts": 0.0, "queued_ts": 0.0},
            TOLD
            | dict.fromkeys(("time_to_first_token_ms", "queue_time_ms", "tokens_per_second")),
        ),
        ({"last_token_ts": 1.5, "first_token_ts": 1.5},
         TOLD | {"time_to_first_token_ms": 0.0, "generation_time_ms": 0.0, "mean_itl_ms": 0.0,
                 "tokens_per_second": None}),
    ],
)  # fmt: skip
def test_what_was_not_measured_is_null(changes: dict[str, Any], told: dict[str, Any]) -> None:
    values = {name: getattr(TIMES, name) for name in TIMES.__slots__} | changes
    found = request_metrics(RequestMetrics(**values))
    assert found == {k: v if v is None else pytest.approx(v) for k, v in told.items()}


def test_without_times() -> None:
    assert request_metrics(None) == NOTHING
