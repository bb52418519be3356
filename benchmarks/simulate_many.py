"""How much memory and time `quire simulate` takes for very many requests.

    python benchmarks/simulate_many.py                          # a million, with a roofline
    python benchmarks/simulate_many.py --requests 1000 10000 100000

Writes a trace of chat at a rate that the simulated machine can serve, and runs the command on
it in a process of its own, whose largest memory is printed. The trace is part of that: its requests
are read before the first one is served.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from quire.workload.trace import TraceHeader, TraceRequest, write_trace

RATE = 400.0
"""Requests per second, which the machine below can serve."""
MACHINE = ("--memory-gb-s", "20", "--gflops", "500")


def chat(count: int) -> Iterator[TraceRequest]:
    rng, now = random.Random(0), 0.0
    for _ in range(count):
        now += rng.expovariate(RATE)
        yield TraceRequest(now, rng.randint(20, 200), rng.randint(5, 30))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--requests", type=int, nargs="+", default=[1_000_000])
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    command = [str(Path(sys.executable).parent / "quire"), "simulate", options.model, *MACHINE]
    for count in options.requests:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.jsonl"
            header = TraceHeader(source="benchmarks/simulate_many.py", synthetic=True)
            write_trace(str(trace), chat(count), header)
            started = time.perf_counter()
            process = subprocess.Popen([*command, "--trace", str(trace)])
            try:
                _, status, used = os.wait4(process.pid, 0)
            except BaseException:
                process.kill()  # or it would go on alone, on a core that others measure with
                raise
            took = time.perf_counter() - started
        if status:
            sys.exit(os.waitstatus_to_exitcode(status))
        print(
            f"{count} requests: {took:.1f} s, at most {used.ru_maxrss / 1024:.0f} MiB", flush=True
        )


if __name__ == "__main__":
    main()
