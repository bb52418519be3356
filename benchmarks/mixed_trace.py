"""Writes the trace that docs/tuning.md tunes for: chat, and now and then a long prompt.

python benchmarks/mixed_trace.py mixed.jsonl [requests per second, 3 if none are given]
quire tune --slo tpot_p99=20ms,ttft_p99=1500ms --trace mixed.jsonl --live-seconds 30
"""

from __future__ import annotations

import random
import sys

from quire.workload.trace import TraceHeader, TraceRequest, write_trace

SECONDS, RATE, LONG_SHARE = 60.0, 3.0, 0.35


def main() -> None:
    rate = float(sys.argv[2]) if len(sys.argv) > 2 else RATE
    if not rate > 0:
        sys.exit(f"requests per second must be above 0, got {sys.argv[2]}")
    rng, now, made = random.Random(7), 0.0, []
    while now < SECONDS:
        now += rng.expovariate(rate)
        if rng.random() < LONG_SHARE:
            made.append(TraceRequest(now, rng.randint(1200, 1700), rng.randint(8, 24)))
        else:
            made.append(TraceRequest(now, rng.randint(30, 120), rng.randint(40, 100)))
    header = TraceHeader(source="benchmarks/mixed_trace.py", synthetic=True)
    write_trace(sys.argv[1], made, header)


if __name__ == "__main__":
    main()
