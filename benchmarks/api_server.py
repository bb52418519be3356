"""What streaming costs the API process: CPU seconds per 1,000 chunks, over real sockets.

The engine core is a process of its own, as always, with the scheduler and the wire format of the
product, but its model computes nothing: each step gives every request a token of plain text after
`--step-ms`. The API process's CPU time (user and system, from /proc) is divided by the chunks that
the clients got. A closed loop of clients in a third process reads them. With `--step-ms 0` the
process is what limits tokens per second; it then merges tokens into fewer chunks, so the figure is
one of chunks larger than a token.

    python benchmarks/api_server.py [--streams 64] [--seconds 10] [--api chat|completions]
    python benchmarks/api_server.py --against OTHER/src     in turns with another checkout
    python benchmarks/api_server.py --peer URL --pid PID --model NAME
                                       a server that runs already, such as another engine's
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from paired import interval

HERE = Path(__file__).resolve()
TOKENS = 512
"""Of each reply."""
WARM_SECONDS = 2.0
STEP_MS = "API_SERVER_STEP_MS"
PATHS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
}


# ---- the server ----------------------------------------------------------------------------------


def core() -> None:
    """The engine-core process: the product's, but for the executor."""
    sys.path[:0] = [str(HERE.parents[1] / "tests" / "engine")]
    from fake_executor import FakeExecutor
    from quire.engine.cores import core_process

    seconds = float(os.environ[STEP_MS]) / 1000

    class Ready(FakeExecutor):
        def execute(self, batch: Any) -> Any:
            time.sleep(seconds)
            result = super().execute(batch)
            self.batches.clear()
            return result

    executor = Ready(lambda prompt, at: 300 + at % 700, num_blocks=20000)
    core_process.EngineCore = functools.partial(  # type: ignore[misc, assignment]
        core_process.EngineCore, executor=executor
    )
    core_process._import_all = lambda weights: None
    code = core_process.main(sys.argv, time.monotonic())
    sys.stderr.flush()
    os._exit(code)


def serve(port: int) -> int:
    """The API process."""
    from quire.config import EngineConfig, ServerConfig
    from quire.engine.cores import process_handle
    from quire.serving.server import run_server

    begin = process_handle.subprocess.Popen

    def other_core(command: list[str], **how: Any) -> Any:
        program = [sys.executable, str(HERE), "--core"]
        return begin(program + command[3:] if command[1:2] == ["-m"] else command, **how)

    process_handle.subprocess.Popen = other_core  # type: ignore[assignment, misc]
    config = EngineConfig.from_options(max_num_seqs=512, max_num_batched_tokens=8192)
    return run_server(config, ServerConfig(port=port, disable_uvicorn_access_log=True))


# ---- the clients ---------------------------------------------------------------------------------


async def read_streams(url: str, path: str, body: dict[str, Any], streams: int, seconds: float,
                       warm: float, pid: int) -> dict[str, float]:  # fmt: skip
    """Clients that each ask again and again; what the server spent while they did."""
    at = urlsplit(url)
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {at.hostname}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    ).encode()
    chunks = replies = 0

    async def one() -> None:
        nonlocal chunks, replies
        reader, writer = await asyncio.open_connection(at.hostname, at.port, limit=2**22)
        while True:
            writer.write(head + payload)
            tail = b""
            while b"data: [DONE]" not in tail:
                data = await reader.read(2**16)
                if not data:
                    raise SystemExit(f"the server closed a stream: {tail[-300:]!r}")
                # A marker may be cut in two: what came last is looked at again, but not counted.
                seen = tail[-5:] + data
                chunks += seen.count(b"data: ") - tail[-5:].count(b"data: ")
                tail = (tail + data)[-64:]
            if not tail.endswith(b"0\r\n\r\n"):
                await reader.readuntil(b"0\r\n\r\n")
            replies += 1

    tasks = [asyncio.ensure_future(one()) for _ in range(streams)]
    server = psutil.Process(pid)

    def look() -> tuple[int, int, float, float]:
        spent = server.cpu_times()
        return chunks, replies, spent.user + spent.system, time.monotonic()

    await asyncio.sleep(warm)
    for task in tasks:
        if task.done():
            task.result()
    before = look()
    await asyncio.sleep(seconds)
    after = look()
    for task in tasks:
        task.cancel()
    got, done, cpu, passed = (b - a for a, b in zip(before, after, strict=True))
    return {
        "cpu_s_per_1000": 1000 * cpu / got,
        "chunks_per_s": got / passed,
        "tokens_per_s": TOKENS * done / passed,
        "busy": cpu / passed,
    }


def measure(source: str, args: argparse.Namespace) -> dict[str, float]:
    """Start a server of this checkout and measure it."""
    port = free_port()
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "QUIRE_LOGGING_LEVEL": "ERROR"}
    env[STEP_MS] = str(args.step_ms)
    command = [sys.executable, str(HERE), "--serve", str(port)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            if not server.stdout.readline():
                raise SystemExit("the server did not start")
            return ask(f"http://127.0.0.1:{port}", server.pid, "quire-demo", args)
        finally:
            server.terminate()
            server.communicate()


def ask(url: str, pid: int, model: str, args: argparse.Namespace) -> dict[str, float]:
    """Measure a server."""
    path, body = PATHS[args.api]
    body = body | {"model": model, "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
    reading = read_streams(url, path, body, args.streams, args.seconds, WARM_SECONDS, pid)
    return asyncio.run(reading)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def report(name: str, found: dict[str, float]) -> None:
    """A line."""
    tokens = found["tokens_per_s"]
    print(
        f"{name:10} {found['cpu_s_per_1000']:.4f} CPU-s per 1,000 chunks, "
        f"{found['chunks_per_s']:,.0f} chunks/s, {found['busy']:.0%} of a processor"
        + (f"; {tokens:,.0f} tokens/s in replies that ended" if tokens else ""),
        flush=True,
    )


def main() -> None:
    """Parse the command line and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the core (20)")
    parser.add_argument("--api", choices=list(PATHS), default="chat")
    parser.add_argument("--against", metavar="SRC", help="src folder of another checkout")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--peer", metavar="URL")
    parser.add_argument("--pid", type=int, help="of the peer's API process")
    parser.add_argument("--model", default="quire-demo", help="the peer's")
    args = parser.parse_args()
    if args.peer is not None:
        return report("peer", ask(args.peer, args.pid, args.model, args))
    ours = str(HERE.parents[1] / "src")
    if args.against is None:
        return report("here", measure(ours, args))
    ratios = []
    for pair in range(args.pairs):
        found = {}
        for source in (ours, args.against)[:: 1 if pair % 2 else -1]:
            found[source] = measure(source, args)["cpu_s_per_1000"]
        ratios.append(found[ours] / found[args.against])
        print(f"{found[ours]:.4f} here, {found[args.against]:.4f} there", flush=True)
    low, high = interval(ratios)
    print(f"ratio {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--core"]:
        del sys.argv[1]
        core()
    elif sys.argv[1:2] == ["--serve"]:
        sys.exit(serve(int(sys.argv[2])))
    else:
        main()
