"""No reply tells of the server's inside, whatever is sent and whatever fails: 2,000 hostile bodies
to all APIs of a server whose engine raises at every place where one can, before the first byte of a
reply and after it."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine, FakeStream, FakeTokenizer
from fuzz_kit import cases
from hostile import GOOD, WHOLE, dump, spoil
from leaks import MARK, leaks
from quire.config import ServerConfig
from quire.outputs import RequestOutput
from quire.params import SamplingParams
from quire.serving.app import ROUTES, build_app
from quire.serving.server_state import ServerState

INSIDE = (
    f"{MARK}: '/srv/models/secret/core.py' at 0x7f3a5c0012d0 in quire.worker.step_runner",
    f"{MARK} <quire.engine.core.EngineCore object at 0x7f3a5c0012d0>",
)
FAULTS: tuple[type[Exception], ...] = (
    RuntimeError, KeyError, OSError, MemoryError, ValueError, TypeError, AssertionError,
    RecursionError, UnicodeError, StopAsyncIteration, TimeoutError, ConnectionError,
)  # fmt: skip
JSON = {"content-type": "application/json"}


class FaultyTokenizer(FakeTokenizer):
    """Raises what it is given."""

    fault: Exception | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self.fault is not None:
            raise self.fault
        return super().encode(text, add_special_tokens)


class FaultyEngine(FakeEngine):
    """Raises, at one place of a request, what nobody expects there."""

    def __init__(self) -> None:
        super().__init__("Some words, one by one.")
        self.tokenizer = FaultyTokenizer()
        self.fault: tuple[str, Exception] | None = None
        """The place and the exception."""

    def choose(self, rng: random.Random) -> None:
        """A place and a fault for the next request, or none."""
        error = rng.choice(FAULTS)(rng.choice(INSIDE))
        place = rng.choice(["", "submit", "stream", "stream", "output", "verb", "tokens"])
        self.fault = (place, error) if place else None
        self.tokenizer.fault = error if place == "tokens" else None
        self.break_after = rng.randrange(2) if place in ("stream", "output") else None
        self.death = error if place == "stream" else None

    async def submit(
        self, prompt: list[int], params: Any, request_id: str, **more: Any
    ) -> FakeStream:
        self._raise("submit")
        return await super().submit(prompt, params, request_id, **more)

    async def call(self, verb: str, /, **args: Any) -> Any:
        self._raise("verb")
        return await super().call(verb, **args)

    def output(
        self,
        stream: FakeStream,
        prompt: list[int],
        params: SamplingParams,
        span: tuple[int, int],
        reason: str | None,
        error: str | None = None,
        **more: Any,
    ) -> RequestOutput:
        words = error and f"{error}: {INSIDE[0]}"
        return super().output(stream, prompt, params, span, reason, words, **more)

    def _raise(self, place: str) -> None:
        if self.fault is not None and self.fault[0] == place:
            raise self.fault[1]


@pytest.fixture
def without_log() -> Iterator[None]:
    """Writing down so many exceptions would take most of the time."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@cases(20)
@pytest.mark.usefixtures("without_log")
async def test_no_reply_tells_of_the_inside(rng: random.Random) -> None:
    engine = FaultyEngine()
    state = ServerState(ServerConfig(), engine)
    transport = httpx.ASGITransport(build_app(state), raise_app_exceptions=False)
    late = 0
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for _ in range(100):
            path = rng.choice([*GOOD, *STREAMS, *STREAMS])
            streams = path in STREAMS and rng.random() < 0.7
            good = GOOD[path] | ({"stream": True} if streams else {})
            body = spoil(rng, good) if rng.random() < 0.5 else dump(good)
            engine.choose(rng)
            headers = JSON | ({"x-resumable": "true"} if rng.random() < 0.2 else {})
            reply = await client.post(path, content=body, headers=headers)
            told = f"{reply.headers}\n{reply.text}"
            assert not leaks(told), (path, engine.fault, leaks(told), body[:300], told[:900])
            late += "event-stream" in told and '"error"' in told
    assert late > 0, "some failed after the first byte"
    assert state.in_flight == 0


STREAMS = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/inference/v1/generate", "/invocations",
]  # fmt: skip


async def test_broken_bodies_and_odd_addresses() -> None:
    transport = httpx.ASGITransport(
        build_app(ServerState(ServerConfig(), FaultyEngine())), raise_app_exceptions=False
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in ROUTES:
            if path == "/openapi.json" or path == "/docs":
                continue  # they quote docstrings
            for method in ("GET", "POST", "DELETE", "PUT"):
                for body in WHOLE.values() if method == "POST" else [b'{"a": NaN}']:
                    reply = await client.request(method, path, content=body, headers=JSON)
                    assert not leaks(reply.text), (method, path, body[:60], reply.text[:500])


@pytest.mark.parametrize("path", [path for path in ROUTES if "POST" in ROUTES.get(path).methods])
def test_every_route_with_a_body_has_a_good_one(path: str) -> None:
    same = {"/v1/score": "/score", "/v1/rerank": "/rerank", "/v2/rerank": "/rerank"}
    spec = ROUTES.get(path)
    if (spec.body or spec.bodies) and not path.endswith("/render"):
        assert same.get(path, path) in GOOD


@pytest.mark.parametrize("text", [
    "KeyError: 5", "at 0x7f3a5c0012d0", "in /usr/lib/x", "core.py line 5", "quire.serving.app",
    "<Foo object at", "Traceback (most", "'/home/x'", "Expected `int` msgspec.json",
])  # fmt: skip
def test_leaks_are_found(text: str) -> None:
    assert leaks(text)


def test_errors_of_the_api_are_no_leaks() -> None:
    words = '{"error": {"type": "BadRequestError", "message": "Unknown field `x` at GET /v1/models'
    assert not leaks(words)
