"""Costs of this checkout beside those of another: processes in turns, ratios, and their interval.

A benchmark measures in a process of its own per checkout, so that each imports its own `quire`; who
goes first changes from pair to pair. Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Costs = dict[str, tuple[float, str]]
"""By name: microseconds of CPU time, and a digest of the result, which must be the same in both
checkouts."""


def in_process(script: str, source: str) -> Costs:
    """Measure a checkout in a process of its own."""
    command = [sys.executable, script, "--work"]
    settings = {"PYTHONPATH": source, "PYTHONHASHSEED": "0", "QUIRE_LOGGING_LEVEL": "ERROR"}
    environment = {**os.environ, **settings}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the medians of samples drawn anew from these."""
    rng = random.Random(0)
    drawn = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    return drawn[100], drawn[3899]


def rows(ours: list[Costs], others: list[Costs]) -> Iterator[str]:
    """The table."""
    for name in ours[0]:
        cost = statistics.median(run[name][0] for run in ours)
        row = f"{name:34} {cost:9.2f} us"
        if others:
            same = {run[name][1] for run in (*ours, *others)}
            ratios = [a[name][0] / b[name][0] for a, b in zip(ours, others, strict=True)]
            low, high = interval(ratios)
            before = statistics.median(run[name][0] for run in others)
            row += f"  before {before:9.2f} us  ratio {statistics.median(ratios):.3f}"
            row += f" [{low:.3f}, {high:.3f}]  {'same' if len(same) == 1 else 'OTHER'} bytes"
        yield row


def main(script: str, description: str, work: Callable[[], Costs]) -> None:
    """Parse the command line; measure, or start the processes that do and print a table."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--against", metavar="SRC", help="src folder of another checkout")
    parser.add_argument("--pairs", type=int, default=12, help="processes of each checkout")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work()))
        return
    own = str(Path(script).resolve().parents[1] / "src")
    ours, others = [], []
    for pair in range(options.pairs):
        for source in (own, options.against)[:: 1 if pair % 2 else -1]:
            if source is not None:
                (ours if source == own else others).append(in_process(script, source))
    print("\n".join(rows(ours, others)))


def tests_of(folder: str) -> None:
    """Make a folder of the measured checkout's tests importable."""
    path: Any = Path(os.environ["PYTHONPATH"]).parent / "tests" / folder
    sys.path.insert(0, str(path))
