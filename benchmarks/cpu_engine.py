"""How fast the engine generates on this CPU, and how that compares with vLLM on the same work.

    python benchmarks/cpu_engine.py --model DIR [--peer-vllm PYTHON] [--json]

Every engine runs in a process of its own (`engine_worker.py`), loads the model once and then runs
each case in turn with the others, so that a noisy machine is noisy for all; a ratio is the median
over the rounds of (peer's seconds / quire's seconds). Prompts are random ids without a shared
prefix, greedy, to a fixed length. `--peer-vllm` is the Python of an environment with vLLM.

The limit on paper of a case: weights streamed once per step at `--bandwidth`, or two operations
per weight and token at `--gflops`, whichever is longer; the head only for sampled tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAUSE = 2.0
"""Seconds between two runs: threads of the engine that ran stop spinning."""


@dataclass(frozen=True)
class Case:
    """`prompts` x `inputs` tokens in, `outputs` tokens out of each."""

    prompts: int
    inputs: int
    outputs: int

    @property
    def tokens(self) -> int:
        """What the rate counts: tokens out, or tokens in if there is but one out."""
        return self.prompts * (self.inputs if self.outputs == 1 else self.outputs)


CASES = {
    "decode_1x16_65": Case(1, 16, 65),
    "8x128_128": Case(8, 128, 128),
    "32x128_128": Case(32, 128, 128),
    "prefill_1x512": Case(1, 512, 1),
    "long_4x4096_64": Case(4, 4096, 64),
}


class Engine:
    """A worker process: one line of JSON in, one out."""

    def __init__(self, name: str, python: str, package: str, model: str, env: dict[str, str]):
        self.name = name
        start = time.perf_counter()
        self._process = subprocess.Popen(
            [python, str(HERE / "engine_worker.py"), package, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr if "--verbose" in sys.argv else subprocess.DEVNULL,
            env=os.environ | env,
            text=True,
        )
        self.about = self._read()
        self.ready_seconds = time.perf_counter() - start

    def run(self, case: Case, seed: int) -> float:
        """Seconds that the engine took for a case."""
        assert self._process.stdin is not None
        job = {"prompts": case.prompts, "in": case.inputs, "out": case.outputs, "seed": seed}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended; run with --verbose to see why")
        return json.loads(line)


def start_engines(options: argparse.Namespace) -> list[Engine]:
    engines = [Engine("quire", sys.executable, "quire", options.model, {})]
    if options.peer_vllm:
        engines.append(
            Engine("vllm", options.peer_vllm, "vllm", options.model, tuned(options.peer_vllm))
        )
    if options.peer_default:
        plain = {"VLLM_CPU_KVCACHE_SPACE": "4", "PYTHONPATH": ""}
        engines.append(Engine("vllm_default", options.peer_vllm, "vllm", options.model, plain))
    return engines


def tuned(python: str) -> dict[str, str]:
    """vLLM's best settings here: all cores, and Intel's OpenMP if its package brought it."""
    cores = sorted(os.sched_getaffinity(0))
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "PYTHONPATH": "",
    }
    for library in Path(python).parent.parent.rglob("libiomp5.so"):
        env["LD_PRELOAD"] = str(library)
        break
    return env


def measure(engines: list[Engine], names: list[str], rounds: int) -> dict[str, dict]:
    results = {}
    for name in names:
        case = CASES[name]
        seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for number in range(rounds):
            # Whoever begins changes, so that none always follows the other.
            for engine in engines[:: 1 if number % 2 else -1]:
                time.sleep(PAUSE)
                seconds[engine.name].append(engine.run(case, 1000 * number + len(results)))
        results[name] = {
            engine: {
                "seconds": [round(s, 3) for s in values],
                "tokens_per_second": round(case.tokens / statistics.median(values), 1),
            }
            for engine, values in seconds.items()
        }
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    return results


def ratios(results: dict[str, dict], engines: list[Engine]) -> dict[str, dict[str, float]]:
    """By peer and case: how many times as fast quire was."""
    out = {}
    for engine in engines[1:]:
        out[engine.name] = {
            name: round(
                statistics.median(
                    theirs / ours
                    for theirs, ours in zip(
                        row[engine.name]["seconds"], row["quire"]["seconds"], strict=True
                    )
                ),
                3,
            )
            for name, row in results.items()
        }
        out[engine.name]["start_to_ready"] = round(
            engine.ready_seconds / engines[0].ready_seconds, 2
        )
    return out


def paper_limit(case: Case, model: Path, bandwidth: float, gflops: float) -> float:
    """Seconds below which no engine can be that reads every weight once per step."""
    from quire.config.shape import ModelShape

    shape = ModelShape.from_folder(model)
    width = shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads)
    layer = shape.hidden_size * (
        width + shape.num_heads * shape.head_dim + 3 * shape.intermediate_size
    )
    body, head = shape.num_layers * layer, shape.vocab_size * shape.hidden_size

    def step(tokens: int, sampled: int) -> float:
        work = 2 * (body * tokens + head * sampled) / (gflops * 1e9)
        return max(work, 2 * (body + head) / (bandwidth * 1e9))

    prefill = step(case.prompts * case.inputs, case.prompts)
    return prefill + (case.outputs - 1) * step(case.prompts, case.prompts)


def machine() -> dict[str, object]:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
    }


def commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--peer-vllm", metavar="PYTHON", help="Python that can import vllm")
    parser.add_argument(
        "--peer-default", action="store_true", help="vLLM once more, as it is out of the box"
    )
    parser.add_argument("--cases", default=",".join(CASES), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--bandwidth", type=float, default=35.0, help="GB/s, for the paper limit")
    parser.add_argument("--gflops", type=float, default=440.0, help="for the paper limit")
    parser.add_argument("--json", action="store_true", help="print one object with everything")
    parser.add_argument("--verbose", action="store_true", help="show what the engines log")
    options = parser.parse_args()
    names = options.cases.split(",")
    if options.peer_default and not options.peer_vllm:
        parser.error("--peer-default needs --peer-vllm")
    unknown = set(names) - set(CASES)
    if unknown:
        parser.error(f"unknown cases {sorted(unknown)}; there are {', '.join(CASES)}")
    engines = start_engines(options)
    for engine in engines:
        engine.run(Case(2, 32, 8), 7)  # the first run of any engine is slower
    results = measure(engines, names, options.rounds)
    for name in names:
        limit = paper_limit(CASES[name], Path(options.model), options.bandwidth, options.gflops)
        best = min(results[name]["quire"]["seconds"])
        results[name]["paper_limit_seconds"] = round(limit, 3)
        results[name]["fraction_of_limit"] = round(limit / best, 3)
    report = {
        "machine": machine(),
        "commit": commit(),
        "versions": {engine.name: engine.about for engine in engines},
        "model": Path(options.model).name,
        "ready_seconds": {engine.name: round(engine.ready_seconds, 2) for engine in engines},
        "results": results,
        "ratios": ratios(results, engines),
    }
    for engine in engines:
        engine.close()
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
