"""What a change of the sampler costs: two source trees take turns at the same requests.

    python benchmarks/sampler_cost.py MODEL OTHER_TREE [--rounds 15] [--tokens 24]

Each tree has a process of its own, with its own native kernels, and generates from random
prompts; a ratio is the median over the rounds of (this tree's seconds / the other's), with the
middle half of the rounds beside it. `make_model.py` makes a MODEL.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
ROWS = (1, 32)
PARAMS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 50},
)


def work(model: str) -> None:
    """Answer each job, a line of JSON, with its seconds."""
    from quire import LLM, SamplingParams

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    llm = LLM(model, max_model_len=512)
    answers.write("ready\n")
    for line in sys.stdin:
        job = json.loads(line)
        numbers = random.Random(job["rows"])
        prompts = [
            {"prompt_token_ids": [numbers.randrange(10, 8000) for _ in range(8)]}
            for _ in range(job["rows"])
        ]
        params = SamplingParams(**job["params"], max_tokens=job["tokens"], ignore_eos=True, seed=1)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        answers.write(f"{time.perf_counter() - start}\n")


class Tree:
    """One source tree's process."""

    def __init__(self, root: Path, model: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, HERE, model, "", "--worker"],
            env=os.environ | {"PYTHONPATH": str(root / "src")},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"

    def seconds(self, job: dict) -> float:
        """How long a job takes."""
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("other")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.model)
        return
    trees = [Tree(root, args.model) for root in (HERE.parents[1], Path(args.other).resolve())]
    for rows in ROWS:
        for params in PARAMS:
            job = {"rows": rows, "params": params, "tokens": args.tokens}
            for tree in trees:
                tree.seconds(job)
            ratios, best = [], [float("inf")] * 2
            for number in range(args.rounds):
                took = [0.0, 0.0]
                for i in (0, 1) if number % 2 else (1, 0):
                    took[i] = trees[i].seconds(job)
                ratios.append(took[0] / took[1])
                best = [min(pair) for pair in zip(best, took, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            steps = " and ".join(f"{1e3 * b / args.tokens:.2f}" for b in best)
            print(f"{rows} rows, {params}: ratio {middle:.3f} ({low:.3f} to {high:.3f}), "
                  f"least ms per token {steps}", flush=True)  # fmt: skip
    for tree in trees:
        tree.process.stdin.close()
        tree.process.wait()


if __name__ == "__main__":
    main()
