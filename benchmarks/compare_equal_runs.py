"""A/A test of `quire bench compare` on a real server: how often equal runs compare as equal.

Starts a server with the embedded model and loads it again and again in the same way (with other
random prompts, so that nothing is cached). Runs belong to the two sides in turns: one, two, two,
one, so that a machine that grows slower is slower for both.

    python benchmarks/compare_equal_runs.py [--repetitions 20] [--runs 4]
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from typing import Any

from quire.bench.compare import compare
from quire.bench.options import ServeOptions
from quire.bench.own_server import own_server
from quire.bench.result import detailed
from quire.bench.serve import run_serve
from quire.workload.options import DatasetOptions


def one(url: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    options = ServeOptions(base_url=url, request_rate=args.request_rate)
    dataset = DatasetOptions(
        num_prompts=args.num_prompts, random_input_len=32, random_output_len=24, seed=seed
    )
    run = asyncio.run(run_serve(options, dataset))
    return run.result | detailed(run.outcome.records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--runs", type=int, default=4, help="of each side, in turns; 1: one result")
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--request-rate", type=float, default=40.0)
    args = parser.parse_args()
    same: Counter[str] = Counter()
    known: Counter[str] = Counter()
    with own_server([]) as url:
        one(url, args, 0)  # the first run pays for what is made on first use
        for i in range(args.repetitions):
            seeds = range(2 * args.runs * i + 1, 2 * args.runs * (i + 1) + 1)
            runs = [one(url, args, seed) for seed in seeds]
            sides: tuple[list[Any], list[Any]] = ([], [])
            for number, run in enumerate(runs):
                sides[(number + 1) // 2 % 2].append(run)
            for difference in compare(*sides, seed=i):
                known[difference.name] += difference.verdict != "unknown"
                same[difference.name] += difference.verdict == "same"
    for name, count in known.items():
        if count:
            print(f"{name:<24}{same[name]:>4} of {count} intervals hold 0")
    print(f"together: {sum(same.values()) / max(1, sum(known.values())):.1%}")


if __name__ == "__main__":
    main()
