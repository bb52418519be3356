"""What a streamed token of plain text costs the API process, in microseconds of CPU time.

A stand-in for the engine has the outputs ready; everything from there to the bytes that uvicorn
would be given is counted: streams, turn events, chunks, server-sent events. Sockets are not.

    python benchmarks/stream_cost.py                        a table
    python benchmarks/stream_cost.py --against OTHER/src    paired with another checkout, in turns:
                                                            the ratio, and its 95 % interval
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import time
from typing import Any

import paired

SHAPES = {"1 stream": (1, 8000), "256 streams": (256, 64)}
"""Streams at the same time, and tokens of each."""
REPEATS = 5
"""Of each shape in one process; the least counts, because nothing can make work cheaper."""
PATHS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
}
WORD = " word"


class ReadyStream:
    """A stream whose outputs are there already; other streams get their turn after each."""

    seed = 7

    def __init__(self, outputs: list[Any], params: Any) -> None:
        self.checked = params
        self._outputs = outputs

    async def __aiter__(self) -> Any:
        for output in self._outputs:
            await asyncio.sleep(0)
            yield output

    async def aclose(self) -> None:
        """Nothing to end."""


def make_engine(tokens: int) -> Any:
    """The tests' fake engine, with streams of so many tokens."""
    paired.tests_of("serving")
    from fake_engine import CheckedParams, FakeEngine
    from quire.outputs import CompletionOutput, RequestOutput

    def output(i: int) -> Any:
        last = i == tokens - 1
        piece = CompletionOutput(0, WORD, [i], finish_reason="length" if last else None)
        return RequestOutput("r", None, [1, 2, 3], [piece], finished=last, seed=7)

    outputs = [output(i) for i in range(tokens)]

    class Engine(FakeEngine):
        async def submit(self, prompt: Any, params: Any, request_id: str, **_: Any) -> Any:
            return ReadyStream(outputs, CheckedParams(params))

    return Engine()


async def one_request(app: Any, path: str, body: dict[str, Any], digest: Any) -> None:
    """A request on ASGI, from a client that stays until the end."""
    given = [{"type": "http.request", "body": json.dumps(body | {"stream": True}).encode()}]
    forever = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not given:
            await forever.wait()
        return given.pop()

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200, "the stand-in does not fit this checkout"
        if digest is not None:
            digest.update(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"r")]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": b"", "headers": headers, "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    await app(scope, receive, send)


async def measure(kind: str, shape: str) -> tuple[float, str]:
    """Microseconds of CPU time per token, and a digest of the bytes of one stream."""
    from quire.config import ServerConfig
    from quire.serving.app import build_app

    try:
        from quire.serving.server_state import ServerState
    except ImportError:  # what it was called before
        from quire.serving.state import ServerState  # type: ignore[no-redef]

    streams, tokens = SHAPES[shape]
    config = ServerConfig(disable_uvicorn_access_log=True)
    app = build_app(ServerState(config, make_engine(tokens)))
    path, body = PATHS[kind]
    digest = hashlib.sha256()
    await one_request(app, path, body, digest)
    best = float("inf")
    for _ in range(REPEATS):
        gc.collect()
        started = time.process_time()
        await asyncio.gather(*(one_request(app, path, body, None) for _ in range(streams)))
        best = min(best, time.process_time() - started)
    return 1e6 * best / (streams * tokens), digest.hexdigest()


def work() -> paired.Costs:
    """Measure this checkout once."""
    time.time = lambda: 1_700_000_000.0  # type: ignore[assignment]
    return {
        f"{kind}, {shape}": asyncio.run(measure(kind, shape)) for kind in PATHS for shape in SHAPES
    }


if __name__ == "__main__":
    paired.main(__file__, str(__doc__), work)
