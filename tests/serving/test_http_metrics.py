"""What the HTTP side counts of its requests, and who cannot make series of it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config import ServerConfig
from quire.serving.app import build_app
from quire.serving.server_state import ServerState
from quire.utils.timing import ManualClock
from silent_core import silent_engine

JSON = {"content-type": "application/json"}
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(client: httpx.AsyncClient) -> Values:
    return read((await client.get("/metrics")).text)


def read(text: str) -> Values:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.name.startswith("http_")
    }


def value(values: Values, name: str, **labels: str) -> float:
    return values.get((name, frozenset(labels.items())), 0.0)


async def test_requests_sizes_and_durations(client: httpx.AsyncClient) -> None:
    body = b'{"prompt": "hi", "model": "quire-demo"}'
    reply = await client.post("/v1/completions", content=body, headers=JSON)
    refused = await client.post("/v1/completions", content=b"{", headers=JSON)
    assert (reply.status_code, refused.status_code) == (200, 400)
    values = await scrape(client)
    where = {"handler": "/v1/completions", "method": "POST"}
    assert value(values, "http_requests_total", status="2xx", **where) == 1
    assert value(values, "http_requests_total", status="4xx", **where) == 1
    handler = {"handler": "/v1/completions"}
    assert value(values, "http_request_size_bytes_sum", **handler) == len(body) + 1
    assert value(values, "http_request_size_bytes_count", **handler) == 2
    sent = len(reply.content) + len(refused.content)
    assert value(values, "http_response_size_bytes_sum", **handler) == sent
    assert value(values, "http_request_duration_seconds_count", **where) == 2
    assert value(values, "http_request_duration_highr_seconds_count") == 2


async def test_a_stream_counts_its_frames_and_its_whole_time(
    client: httpx.AsyncClient, engine: Any
) -> None:
    engine.delay = 0.05
    body = {"prompt": "hi", "stream": True}
    reply = await client.post("/v1/completions", json=body)
    values = await scrape(client)
    handler = {"handler": "/v1/completions"}
    assert value(values, "http_response_size_bytes_sum", **handler) == len(reply.content) > 100
    took = value(values, "http_request_duration_seconds_sum", method="POST", **handler)
    assert took >= len(engine.reply) * engine.delay


BODIES = [
    (b'{"prompt": "hi", "max_tokens": 1}', "2xx"),
    (b'{"prompt": ["a", "b"], "max_tokens": 1, "stream": true}', "2xx"),
    (b"{", "4xx"),
]


@pytest.mark.parametrize(("body", "status"), BODIES, ids=["whole", "stream", "refused"])
async def test_a_reply_is_counted_before_its_last_bytes_leave(body: bytes, status: str) -> None:
    """Whoever has the whole reply and asks then finds it, in the engine's metrics too."""
    engine, _ = silent_engine()
    engine.frontend.prometheus._clock = ManualClock()  # the text would never be too old
    state = ServerState(ServerConfig(), engine)
    engine.metrics_text()
    seen: list[tuple[int, bytes]] = []
    messages = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            text = engine.metrics_text() + state.http_text.render()
            seen.append((message.get("more_body", False), text))

    scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
    headers = [(name.encode(), value.encode()) for name, value in JSON.items()]
    await build_app(state)(scope | {"query_string": b"", "headers": headers}, receive, send)
    row = f'http_requests_total{{handler="/v1/completions",method="POST",status="{status}"}} 1.0'
    more, last = seen[-1]
    assert not more and row in last.decode()
    assert all(row not in text.decode() for _, text in seen[:-1])
    if status == "2xx":
        rows = [r for r in last.decode().splitlines() if r.startswith("vllm:request_success_total")]
        (ended,) = [r for r in rows if 'finished_reason="length"' in r]
        assert float(ended.split()[-1]) == (2 if b"stream" in body else 1)
    await build_app(state)(
        scope | {"query_string": b"", "headers": [], "path": "/livez"}, receive, send
    )
    assert state.http_text.render().decode().count(row) == 1, "and once only"


async def test_probes_and_scrapes_are_not_counted(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/livez", "/ping", "/version", "/metrics", "/load"):
        await client.get(path)
    values = await scrape(client)
    assert not any(name == "http_requests_total" for name, _ in values)
    assert value(values, "http_request_duration_highr_seconds_count") == 0


async def test_callers_cannot_make_series(client: httpx.AsyncClient) -> None:
    for number in range(20):
        await client.get(f"/nothing/{number}")
        await client.request(f"M{number}", "/v1/models")
        await client.get(f"/v1/models/some-{number}")
    values = await scrape(client)
    counted = {labels: v for (name, labels), v in values.items() if name == "http_requests_total"}
    assert len(counted) == 3 and sum(counted.values()) == 60
    nothing = {"method": "GET", "handler": "none", "status": "4xx"}
    assert value(values, "http_requests_total", **nothing) == 20
    model = {"method": "GET", "handler": "/v1/models/{id:path}", "status": "4xx"}
    assert value(values, "http_requests_total", **model) == 20
    odd = {"method": "other", "handler": "/v1/models", "status": "4xx"}
    assert value(values, "http_requests_total", **odd) == 20


def test_durations_go_into_buckets(state: ServerState) -> None:
    for seconds in (0.05, 0.4, 0.7, 45.0):
        state.http.observe("/v1/completions", "POST", 200, seconds, 1, 2)
    values = read(state.http_text.render().decode())
    where = {"handler": "/v1/completions", "method": "POST"}
    counts = {
        le: value(values, "http_request_duration_seconds_bucket", le=le, **where)
        for le in ("0.1", "0.5", "1.0", "+Inf")
    }
    assert counts == {"0.1": 1, "0.5": 2, "1.0": 3, "+Inf": 4}
    assert value(values, "http_request_duration_highr_seconds_bucket", le="30.0") == 3
    assert value(values, "http_request_duration_highr_seconds_bucket", le="60.0") == 4


@pytest.mark.parametrize(
    "status, group", [(None, "4xx"), (200, "2xx"), (503, "5xx")], ids=["gone", "ok", "failed"]
)
def test_statuses_are_grouped(state: ServerState, status: int | None, group: str) -> None:
    state.http.observe("/v1/chat/completions", "POST", status, 0.1, 1, 2)
    assert f'status="{group}"' in state.http_text.render().decode()
