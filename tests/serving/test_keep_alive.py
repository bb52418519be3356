"""Silent streams of server-sent events get comment lines; nothing else does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fake_engine import FakeEngine
from patience import PATIENCE
from quire.config import ServerConfig
from quire.serving import keep_alive
from quire.serving.app import build_app
from quire.serving.dialect import OPENAI
from quire.serving.exchange import Exchange
from quire.serving.keep_alive import COMMENT, kept_alive
from quire.serving.server_state import ServerState

COMPLETIONS = ("/v1/completions", {"prompt": "hi", "seed": 1})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "seed": 1})


class Reader:
    """A caller on bare ASGI that keeps every piece it is sent."""

    def __init__(self, state: ServerState, path: str, body: dict[str, Any]) -> None:
        self.pieces: list[bytes] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http", "method": "POST", "path": path, "http_version": "1.1",
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        self.task = asyncio.ensure_future(build_app(state)(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        return await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        self.pieces.append(message.get("body", b""))
        await self.reads.wait()

    async def comments(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.pieces.count(COMMENT) < count:
                await asyncio.sleep(0.001)


@pytest.mark.parametrize(("path", "body"), [COMPLETIONS, CHAT])
async def test_a_silent_stream_gets_comments_between_its_frames(
    path: str, body: dict[str, Any], engine: FakeEngine
) -> None:
    state = ServerState(ServerConfig(stream_keep_alive=0.001), engine)
    engine.hang.clear()
    reader = Reader(state, path, {**body, "stream": True})
    await reader.comments(3)
    engine.hang.set()
    await asyncio.wait_for(reader.task, PATIENCE)
    assert reader.pieces[-1].endswith(b"data: [DONE]\n\n"), "nothing comes after the end"
    frames = b"".join(piece for piece in reader.pieces if piece != COMMENT)
    assert all(f.startswith(b"data: ") for f in frames.strip().split(b"\n\n")), frames


async def test_a_reader_who_does_not_read_has_one_comment_waiting(engine: FakeEngine) -> None:
    state = ServerState(ServerConfig(stream_keep_alive=0.001), engine)
    engine.hang.clear()
    reader = Reader(state, COMPLETIONS[0], {**COMPLETIONS[1], "stream": True})
    await reader.comments(1)
    reader.reads.clear()
    await reader.comments(reader.pieces.count(COMMENT) + 1)
    waiting = len(reader.pieces)
    await asyncio.sleep(0.02)  # many times the silence
    assert len(reader.pieces) == waiting
    reader.reads.set()
    engine.hang.set()
    await asyncio.wait_for(reader.task, PATIENCE)
    assert reader.pieces[-1].endswith(b"data: [DONE]\n\n")


async def test_a_whole_reply_gets_none(engine: FakeEngine) -> None:
    state = ServerState(ServerConfig(stream_keep_alive=0.001), engine)
    engine.hang.clear()
    reader = Reader(state, *COMPLETIONS)
    await asyncio.sleep(0.02)
    engine.hang.set()
    await asyncio.wait_for(reader.task, PATIENCE)
    assert json.loads(b"".join(reader.pieces))["choices"]


@pytest.mark.parametrize(
    ("seconds", "kind", "kept"),
    [
        (1, OPENAI.stream_type, True),
        (0, OPENAI.stream_type, False),
        (1, b"application/x-ndjson", False),
    ],
)
async def test_only_events_have_comments_and_zero_is_never(
    seconds: float, kind: bytes, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Keeper:
        def __init__(self, *about: Any) -> None:
            made.append(about)

        def stop(self) -> None:
            pass

    monkeypatch.setattr(keep_alive, "_Keeper", Keeper)
    exchange = Exchange({}, None, None, ServerState(ServerConfig(stream_keep_alive=seconds)))
    with kept_alive(exchange, kind):
        assert bool(made) == kept
