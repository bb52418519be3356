"""How long streams stand still when the engine core is killed under load, part by part.

    python benchmarks/recovery.py                       the embedded model, without and with a spare
    python benchmarks/recovery.py --model DIR           another model (`make_model.py qwen2.5-0.5b`)
    python benchmarks/recovery.py --kills 10 --json     one JSON object

Streams run all the time, each a prompt of its own. A gap is the time between two events of one
stream; that of a kill is the longest of the gaps that were open when it was sent. The parts are
what the server says of each replacement in its log. With the spare, a kill waits until it is ready.
What else the machine does makes all of it longer: the load average is told with the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import psutil

TOOK = re.compile(r"took over in ([\d.]+) s \((.*?)\)")
LIMIT = 600.0
"""Seconds that anything may take."""


class Server:
    """`quire serve` and what it says."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "quire", "serve", "--port", "0", *flags]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen([*command, "--core-restart-limit", "1000"], **out)
        self.url = ""
        self.parts: list[dict[str, float]] = []
        self._said = ""
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._ready.wait(LIMIT) or not self.url:
            sys.exit(f"the server does not start:\n{self._said}")

    def _read(self) -> None:
        for line in self.process.stdout:
            self._said += line
            if not self.url and (found := re.search(r"http://127\.0\.0\.1:\d+", line)):
                self.url = found[0]
            if "curl" in line:
                self._ready.set()
            if found := TOOK.search(line):
                pairs = (part.rpartition(" ") for part in found[2].split(", "))
                told = {name: float(seconds) for name, _, seconds in pairs}
                self.parts.append({**told, "total": float(found[1])})
        self._ready.set()

    def child(self, title: str) -> psutil.Process | None:
        """The core or the spare, once it has that title."""
        for child in psutil.Process(self.process.pid).children():
            try:
                if " ".join(child.cmdline()).strip() == title:
                    return child
            except psutil.Error:
                continue
        return None

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


class Load:
    """Streams without end, and the gaps in them."""

    def __init__(self, url: str, prompt: int, tokens: int) -> None:
        self.gaps: list[float] = []
        self.last: dict[int, float] = {}
        """Of each stream that runs, when its last event came."""
        self._url, self._prompt, self._tokens = url, prompt, tokens
        self._number = 0

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=LIMIT) as client:
            while True:
                self._number += 1
                await self._stream(client, self._number)

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        ids = [5 + (7 * i + 31 * number) % 200 for i in range(self._prompt)]
        body = {"prompt": ids, "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body | {"seed": number}) as reply:
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if '"error"' in line:
                    sys.exit(f"a request was lost: {line}")
                now = time.monotonic()
                if number in self.last:
                    self.gaps.append(now - self.last[number])
                self.last[number] = now
        self.last.pop(number, None)

    async def flowing(self, since: float, streams: int) -> None:
        """Wait until so many streams have brought something since then."""
        while sum(at > since for at in self.last.values()) < streams:
            await asyncio.sleep(0.01)


async def measure(server: Server, given: argparse.Namespace, spare: bool) -> dict[str, Any]:
    """Kill the core a number of times."""
    load = Load(server.url, given.prompt, given.tokens)
    streams = [asyncio.create_task(load.run()) for _ in range(given.streams)]
    waits: list[float] = []
    for number in range(given.kills):
        await load.flowing(time.monotonic(), given.streams)
        while len(server.parts) < number or (spare and not server.child("quire::SpareCore")):
            await asyncio.sleep(0.05)
        await asyncio.sleep(given.pause)
        core = server.child("quire::EngineCore")
        assert core is not None, "it has taken over"
        before = len(load.gaps)
        killed = time.monotonic()
        os.kill(core.pid, signal.SIGKILL)
        await load.flowing(killed + 0.02, given.streams)
        waits.append(max(load.gaps[before:]))
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    while len(server.parts) < given.kills:
        await asyncio.sleep(0.05)
    names = dict.fromkeys(name for parts in server.parts for name in parts)
    return {
        "spare": spare,
        "kills": given.kills,
        "parts": {n: statistics.median(p.get(n, 0.0) for p in server.parts) for n in names},
        "total_max": max(p["total"] for p in server.parts),
        "kill_gap_p50": quantile(waits, 0.5),
        "kill_gap_p99": quantile(waits, 0.99),
        "gap_p50": quantile(load.gaps, 0.5),
        "gap_p99": quantile(load.gaps, 0.99),
        "load_average": os.getloadavg()[0],
    }


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def show(row: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["parts"].items())
    return (
        f"{'with' if row['spare'] else 'without'} a spare, {row['kills']} kills, "
        f"load {row['load_average']:.1f}\n"
        f"  median of each part, s: {parts}; longest total {row['total_max']:.2f}\n"
        f"  gap at a kill, s: p50 {row['kill_gap_p50']:.2f}, p99 {row['kill_gap_p99']:.2f}\n"
        f"  all gaps, ms: p50 {1000 * row['gap_p50']:.0f}, p99 {1000 * row['gap_p99']:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a killed engine core is missed.")
    parser.add_argument("--model", help="a model folder; the embedded model if left out")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=256, help="generated by each stream")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds of work before a kill")
    parser.add_argument("--spare", choices=("without", "with", "both"), default="both")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = []
    for spare in (False, True):
        if given.spare not in ("both", "with" if spare else "without"):
            continue
        server = Server(*([given.model] if given.model else []), *["--warm-spare"] * spare)
        try:
            rows.append(asyncio.run(measure(server, given, spare)))
        finally:
            server.stop()
        if not given.json:
            print(show(rows[-1]), flush=True)
    if given.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
