"""What watching a server costs it: ten scrapes of /metrics a second and a trace of every step.

Clients that stream keep one server busy, one request after the other. Watched and unwatched windows
alternate within the life of that server (A B B A), so that a machine that changes its speed changes
both. Two figures come out of each pair of neighbours:

- throughput: generated tokens per second over the whole steps in the window, from the server's
  own timeline, read after the window has ended;
- CPU seconds per token of the API process and of the engine core, from /proc. These resolve what
  throughput on a shared machine does not: their difference, as a share of what the machine has, is
  the most that watching can take away from a server that uses all of it.

Reported are medians over the pairs with 95 % intervals from a bootstrap. Whether a request is
traced is said by the caller's `traceparent`, so one server serves both kinds.

    python benchmarks/observe_server.py [--model DIR] [--watch both|scrape|trace] [--json]

`--model step20ms` is a model of random weights, made on the spot, whose step takes about 20 ms with
64 requests running on two cores; the embedded model (`--model ''`) is the worst case: its steps are
shorter than any other model's, so watching takes the largest share of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

SCRAPES_PER_SECOND = 10.0
RESAMPLES = 4000
TRACED, UNTRACED = "01", "00"
"""Flags of `traceparent`: the caller records its trace, or does not."""


# ---------------------------------------------------------------------------------- the other end


def receive() -> None:
    """A collector in memory: takes spans over gRPC and forgets them. Says its port, and on its
    end how many bytes came."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    total = 0

    def export(request: bytes, context: Any) -> bytes:
        nonlocal total
        total += len(request)
        return b""

    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(export)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"Export": handler}),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    signal.sigwait([signal.SIGTERM])
    server.stop(0).wait()
    print(total, flush=True)


@contextlib.contextmanager
def receiver() -> Iterator[tuple[str, list[int]]]:
    """Its endpoint, and the bytes it got once it has ended."""
    command = [sys.executable, str(Path(__file__).resolve()), "--receive"]
    # The signal is blocked from the start, so that none is lost before `sigwait`.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    got: list[int] = []
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}", got
    finally:
        process.terminate()
        got.append(int(process.stdout.readline()))
        process.wait(10)
        process.stdout.close()


@contextlib.contextmanager
def serving(arguments: Sequence[str]) -> Iterator[tuple[int, int]]:
    """`quire serve` as (process id, port)."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *arguments]
    with Path(os.devnull).open("w") as nothing:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=nothing, text=True)
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if "quire is ready at" in line)
        found = re.search(r":(\d+)", line.partition("//")[2])
        assert found is not None, line
        yield server.pid, int(found.group(1))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)


def cpu_seconds(pid: int) -> float:
    """What all threads of a process have used."""
    used = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it may have ended
            used += int((task / "schedstat").read_text().split()[0])
    return used / 1e9


def child_of(pid: int) -> int:
    """The engine core of a server."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1, children
    return int(children[0])


# ----------------------------------------------------------------------------------- the clients


@dataclass
class Window:
    """A stretch of time and what happened in it."""

    watched: bool
    start: float
    """Seconds on the monotonic clock, which all processes share."""
    end: float = 0.0
    api_seconds: float = 0.0
    core_seconds: float = 0.0
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    """Start, seconds and generated tokens of the steps that began in it, the last left out."""
    rate: float = 0.0
    """Tokens per second."""

    def read(self, timeline: dict[str, Any]) -> None:
        """Find its steps in the server's timeline."""
        origin = timeline["otherData"]["origin_seconds"]
        steps = [
            (origin + e["ts"] / 1e6, e["dur"] / 1e6, e["args"]["generated_tokens"])
            for e in timeline["traceEvents"]
            if e["ph"] == "X" and e["name"].startswith("step ")
        ]
        assert steps and steps[0][0] < self.start, "--record-steps keeps too few"
        inside = [step for step in steps if self.start <= step[0] < self.end]
        self.steps = inside[:-1]
        self.rate = self.generated / (inside[-1][0] - inside[0][0])

    @property
    def generated(self) -> int:
        return sum(tokens for _, _, tokens in self.steps)

    @property
    def tokens(self) -> float:
        """In the whole window."""
        return self.rate * (self.end - self.start)


class Load:
    """Clients that stream one request after the other, and a scraper that comes and goes."""

    def __init__(self, port: int, options: argparse.Namespace) -> None:
        self.port = port
        self.options = options
        self.watched = False
        self.scrapes = 0
        self._random = random.Random(0)

    def _body(self) -> bytes:
        low = self.options.outputs // 2
        tokens = self._random.randint(low, 2 * self.options.outputs - low)
        prompt = [self._random.randrange(300, 2000) for _ in range(self.options.inputs)]
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        return json.dumps(body).encode()

    def _head(self, size: int) -> bytes:
        traced = self.watched and self.options.watch != "scrape"
        parent = f"00-{self._random.getrandbits(128):032x}-{self._random.getrandbits(64) | 1:016x}"
        return (
            "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            f"traceparent: {parent}-{TRACED if traced else UNTRACED}\r\n"
            f"Content-Length: {size}\r\n\r\n"
        ).encode()

    async def client(self, number: int) -> None:
        await asyncio.sleep(self._random.random() * self.options.spread)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            while True:
                body = self._body()
                writer.write(self._head(len(body)) + body)
                await self._read(reader)
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        tail = b""
        while b"[DONE]" not in tail:
            chunk = await reader.read(65536)
            assert chunk, "the server closed the connection"
            tail = (tail + chunk)[-16:]

    async def scraper(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            while True:
                started = time.monotonic()
                if self.watched and self.options.watch != "trace":
                    await get(reader, writer, "/metrics")
                    self.scrapes += 1
                rest = 1 / SCRAPES_PER_SECOND - (time.monotonic() - started)
                await asyncio.sleep(max(0.0, rest))
        finally:
            writer.close()


async def get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> bytes:
    """The body of a GET."""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    assert found is not None and b" 200 " in head, head
    return await reader.readexactly(int(found[1]))


async def measure(pid: int, port: int, options: argparse.Namespace) -> tuple[list[Window], int]:
    """The windows in order, and the number of scrapes."""
    load, core = Load(port, options), child_of(pid)
    jobs = [asyncio.create_task(load.client(i)) for i in range(options.clients)]
    jobs.append(asyncio.create_task(load.scraper()))
    windows = []
    records = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.sleep(options.warm_up)
    for number in range(2 * options.pairs):
        load.watched = number % 4 in (1, 2)
        await asyncio.sleep(options.settle)
        for job in jobs:
            if job.done():
                job.result()
        window = Window(load.watched, time.monotonic())
        api, engine = cpu_seconds(pid), cpu_seconds(core)
        await asyncio.sleep(options.seconds)
        window.end = time.monotonic()
        window.api_seconds = cpu_seconds(pid) - api
        window.core_seconds = cpu_seconds(core) - engine
        window.read(json.loads(await get(*records, "/v1/timeline?steps=4096")))
        windows.append(window)
    records[1].close()
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    return windows, load.scrapes


# -------------------------------------------------------------------------------------- figures


def interval(values: Sequence[float]) -> dict[str, float]:
    """Median with a 95 % interval: that of the medians of samples drawn anew."""
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]
    return {"median": statistics.median(values), "low": low, "high": high}


def figures(windows: Sequence[Window]) -> dict[str, Any]:
    """What the pairs say, in percent."""
    neighbours = [
        sorted(windows[i : i + 2], key=lambda w: w.watched) for i in range(0, len(windows), 2)
    ]
    cores = len(os.sched_getaffinity(0))

    def over(read: Callable[[Window, Window], float]) -> dict[str, float]:
        found = interval([100 * read(off, on) for off, on in neighbours])
        return {name: round(value, 3) for name, value in found.items()}

    def extra(off: Window, on: Window, which: str) -> float:
        """CPU seconds per token more, times tokens per second, of all that the cores have."""
        more = getattr(on, which) / on.tokens - getattr(off, which) / off.tokens
        return more * off.rate / cores

    off = [window for window in windows if not window.watched]
    return {
        "pairs": len(neighbours),
        "step_ms": round(1e3 * statistics.median(s for w in off for _, s, _ in w.steps), 2),
        "tokens_per_second": round(statistics.median(w.rate for w in off), 1),
        "api_us_per_token": round(
            1e6 * statistics.median(w.api_seconds / w.tokens for w in off), 1
        ),
        "core_us_per_token": round(
            1e6 * statistics.median(w.core_seconds / w.tokens for w in off), 1
        ),
        "throughput_change_percent": over(lambda off, on: on.rate / off.rate - 1),
        "throughput_changes": [round(100 * (on.rate / off.rate - 1), 2) for off, on in neighbours],
        "api_cpu_of_machine_percent": over(lambda off, on: extra(off, on, "api_seconds")),
        "core_cpu_of_machine_percent": over(lambda off, on: extra(off, on, "core_seconds")),
    }


MADE: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
"""Of `step20ms`: 20 M parameters, the embedded model's tokenizer."""


def make_model(folder: Path) -> str:
    """A model of random weights; its folder."""
    import torch
    from safetensors.torch import save_file

    import quire

    demo = Path(quire.__file__).parent / "assets" / "quire-demo"
    for path in demo.glob("*token*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps(MADE), "utf-8")
    torch.manual_seed(0)
    hidden, inner = MADE["hidden_size"], MADE["intermediate_size"]
    queries, keys = (MADE[f"num_{n}_heads"] * MADE["head_dim"] for n in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    names = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(MADE["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    names["model.embed_tokens.weight"] = (MADE["vocab_size"], hidden)
    names["model.norm.weight"] = (hidden,)
    tensors = {
        name: (torch.randn(shape) * 0.05 if len(shape) > 1 else torch.ones(shape)).bfloat16()
        for name, shape in names.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Serve, load, measure."""
    with tempfile.TemporaryDirectory() as scratch, receiver() as (endpoint, received):
        flags = ["--otlp-traces-endpoint", endpoint, "--trace-decode-steps", "all"]
        flags += ["--max-num-seqs", str(options.clients), "--no-enable-prefix-caching"]
        flags += ["--max-model-len", str(options.inputs + 2 * options.outputs)]
        if options.model:
            made = options.model == "step20ms"
            flags.insert(0, make_model(Path(scratch)) if made else options.model)
        with serving(flags) as (pid, port):
            windows, scrapes = asyncio.run(measure(pid, port, options))
    for w in windows if options.windows else ():
        print(f"{'watched' if w.watched else '       '} {w.rate:8.1f} tokens/s", file=sys.stderr)
    return {
        "model": Path(options.model).name or "quire-demo",
        "kernels": os.environ.get("QUIRE_KERNELS", "auto"),
        "running": options.clients,
        "watch": options.watch,
        "scrapes": scrapes,
        "trace_megabytes": round(received[0] / 1e6, 2),
        **figures(windows),
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The load and the windows."""
    parser.add_argument("--model", default="", help="a folder, or step20ms")
    parser.add_argument("--watch", choices=("both", "scrape", "trace"), default="both")
    parser.add_argument("--clients", type=int, default=64, help="requests at once")
    parser.add_argument("--inputs", type=int, default=32, help="prompt tokens of a request")
    parser.add_argument("--outputs", type=int, default=64, help="output tokens, on average")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of windows")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a window")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds between two windows")
    parser.add_argument(
        "--spread", type=float, default=2.0, help="seconds over which clients start"
    )
    parser.add_argument(
        "--warm-up", type=float, default=4.0, help="seconds before the first window"
    )
    parser.add_argument("--windows", action="store_true", help="print each window to stderr")


def describe(result: dict[str, Any]) -> str:
    """The result in words."""

    def text(name: str) -> str:
        value = result[name]
        return f"{value['median']:+.2f} % ({value['low']:+.2f} to {value['high']:+.2f})"

    return "\n".join(
        [
            f"{result['model']}, {result['kernels']} kernels, {result['running']} running, a step "
            f"of {result['step_ms']} ms, {result['tokens_per_second']} tokens/s; "
            f"watched: {result['watch']}, {result['pairs']} pairs of windows",
            f"  throughput {text('throughput_change_percent')}",
            f"  CPU of the API process {text('api_cpu_of_machine_percent')} of the machine",
            f"  CPU of the engine core {text('core_cpu_of_machine_percent')} of the machine",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive()
        return 0
    result = run(options)
    print(json.dumps(result) if options.json else describe(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
