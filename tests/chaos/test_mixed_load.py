"""What drills compare: outcomes of Responses and Messages are whole and repeatable, and those of
streams are the same through connections that can be resumed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from live_server import serving
from mixed_load import (
    KINDS,
    MESSAGES,
    RESPONSES,
    Outcome,
    client,
    mixed_asks,
    run_all,
    run_resumable,
)


def test_every_api_is_asked_streamed_and_whole() -> None:
    asks = mixed_asks(4 * len(KINDS))
    found = {(ask.path, ask.body["stream"]) for ask in asks}
    assert len(found) == 8, found
    assert all("temperature" in ask.body for ask in asks)


def test_outcomes_are_whole_and_repeatable() -> None:
    asks = [ask for ask in mixed_asks(4 * len(KINDS), 24) if ask.path in (RESPONSES, MESSAGES)]
    streamed = [ask for ask in asks if ask.body["stream"]]
    whole = [replace(ask, body=ask.body | {"stream": False}) for ask in streamed]

    async def resumable(url: str) -> list[Outcome]:
        async with client(url) as http:
            return list(await asyncio.gather(*(run_resumable(http, ask, 60) for ask in streamed)))

    with serving("--no-enable-prefix-caching") as server:
        first, again = (asyncio.run(run_all(server.url, asks)) for _ in range(2))
        kept = asyncio.run(resumable(server.url))
        plain = asyncio.run(run_all(server.url, whole))
    for ask, out, other in zip(asks, first, again, strict=True):
        assert out.is_whole and out == other, (ask.name, out)
        assert out.choices[0][0], ask.name
    by_name = dict(zip((ask.name for ask in asks), first, strict=True))
    for ask, out, one in zip(streamed, kept, plain, strict=True):
        assert out == by_name[ask.name], ask.name
        assert out.choices[0][0] == one.choices[0][0], "streamed and whole say the same"


@pytest.mark.parametrize("part", [
    {"type": "error", "error": {"type": "api_error", "message": "x"}},
    {"type": "error", "code": "step_failed", "message": "x", "param": None},
    {"type": "response.failed", "response": {"error": {"code": "server_error"}, "output": []}},
])  # fmt: skip
def test_errors_of_streams_are_noticed(part: dict[str, object]) -> None:
    out = Outcome(200)
    out.take({"type": "response.output_text.delta", "delta": "a"})
    out.take({"type": "response.completed", "response": {"status": "completed"}})
    assert out.is_whole
    out.take(part)
    assert not out.is_whole
