"""What a streamed token of plain text costs the API process, in microseconds of CPU time.

A stand-in for the engine has the outputs ready; everything from there to the bytes that uvicorn
would be given is counted: streams, turn events, chunks, server-sent events. Sockets are not.

    python benchmarks/stream_cost.py                        a table
    python benchmarks/stream_cost.py --against OTHER/src    paired with another checkout, in turns:
                                                            the ratio, and its 95 % interval
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    sys.path.insert(0, str(Path(os.environ["PYTHONPATH"]).parent / "tests" / "serving"))
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


def work() -> None:
    """Measure this checkout once and print the numbers."""
    time.time = lambda: 1_700_000_000.0  # type: ignore[assignment]
    results = {}
    for kind in PATHS:
        for shape in SHAPES:
            results[f"{kind}, {shape}"] = asyncio.run(measure(kind, shape))
    print(json.dumps(results))


def in_process(source: str) -> dict[str, tuple[float, str]]:
    """Measure a checkout in a process of its own."""
    command = [sys.executable, __file__, "--work"]
    environment = {**os.environ, "PYTHONPATH": source, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the medians of samples drawn anew from these."""
    rng = random.Random(0)
    drawn = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    return drawn[100], drawn[3899]


def rows(ours: list[Any], others: list[Any]) -> Iterator[str]:
    """The table."""
    for name in ours[0]:
        cost = statistics.median(run[name][0] for run in ours)
        row = f"{name:26} {cost:8.2f} us"
        if others:
            same = {run[name][1] for run in (*ours, *others)}
            ratios = [a[name][0] / b[name][0] for a, b in zip(ours, others, strict=True)]
            low, high = interval(ratios)
            before = statistics.median(run[name][0] for run in others)
            row += f"  before {before:8.2f} us  ratio {statistics.median(ratios):.3f}"
            row += f" [{low:.3f}, {high:.3f}]  {'same' if len(same) == 1 else 'OTHER'} bytes"
        yield row


def main() -> None:
    """Parse the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", metavar="SRC", help="src folder of another checkout")
    parser.add_argument("--pairs", type=int, default=12, help="processes of each checkout")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work()
    own = str(Path(__file__).resolve().parents[1] / "src")
    ours, others = [], []
    for pair in range(options.pairs):
        for source in (own, options.against)[:: 1 if pair % 2 else -1]:
            if source is not None:
                (ours if source == own else others).append(in_process(source))
    print("\n".join(rows(ours, others)))


if __name__ == "__main__":
    main()
