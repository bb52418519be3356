"""How fast the engine generates on this CPU, and how that compares with its peers on the same work.

    python benchmarks/cpu_engine.py --model DIR [--peer-vllm PYTHON] [--peer-llama PYTHON] [--json]

Every engine runs in a process of its own (`engine_worker.py`, `llama_worker.py`), loads the model
once and then runs each case in turn with the others, so that a noisy machine is noisy for all; a
ratio is the median over the rounds of (peer's seconds / quire's seconds). Prompts are random ids
without a shared prefix, greedy, to a fixed length. `--peer-vllm` is the Python of an environment
with vLLM, `--peer-llama` that of one with `llama-cpp-python` and `gguf`; the model is converted for
it (`to_gguf.py`).

The limit on paper of a case: weights streamed once per step at the speed of the memory, or two
operations per weight and token at the speed of the registers, whichever is longer; the head only
for sampled tokens. Both speeds are measured before and after each run of quire, because a shared
machine's memory is not equally fast for a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from quire.config.shape import ModelShape
from quire.kernels.compiled import choose_isa, set_num_threads
from quire.kernels.probe import Probe, Rates
from quire.utils.host import available_cores

HERE = Path(__file__).resolve().parent
PAUSE = 2.0
"""Seconds between two runs: threads of the engine that ran stop spinning."""


VLLM = {"VLLM_CPU_KVCACHE_SPACE": "4", "PYTHONPATH": ""}
"""vLLM's environment out of the box, but for the memory that it takes."""


@dataclass(frozen=True)
class Case:
    """`prompts` x `inputs` tokens in, `outputs` tokens out of each."""

    prompts: int
    inputs: int
    outputs: int
    repeats: int = 1
    """How often in each round: what takes half a second says little if it is done once."""

    @property
    def tokens(self) -> int:
        """What the rate counts: tokens out, or tokens in if there is but one out."""
        return self.prompts * (self.inputs if self.outputs == 1 else self.outputs)


CASES = {
    "decode_1x16_65": Case(1, 16, 65, repeats=2),
    "8x128_128": Case(8, 128, 128),
    "32x128_128": Case(32, 128, 128),
    "prefill_1x512": Case(1, 512, 1, repeats=4),
    "long_4x4096_64": Case(4, 4096, 64),
}


class Engine:
    """A worker process: one line of JSON in, one out."""

    def __init__(self, name: str, command: list[str], env: dict[str, str]):
        self.name = name
        start = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr if "--verbose" in sys.argv else subprocess.DEVNULL,
            env=os.environ | env,
            text=True,
        )
        self.about = self._read()
        self.ready_seconds = time.perf_counter() - start

    def run(self, case: Case, seed: int) -> float:
        """Seconds that the engine took for a case, the mean of its repeats."""
        total = sum(self._run_once(case, seed + 100 * i) for i in range(case.repeats))
        return total / case.repeats

    def _run_once(self, case: Case, seed: int) -> float:
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


def start_engines(options: argparse.Namespace, folder: str) -> list[Engine]:
    """quire first; `folder` takes what a peer needs to have converted."""
    worker = str(HERE / "engine_worker.py")
    engines = [Engine("quire", [sys.executable, worker, "quire", options.model], {})]
    vllm = [options.peer_vllm, worker, "vllm", options.model]
    if options.peer_vllm:
        engines.append(Engine("vllm", vllm, tuned(options.peer_vllm)))
    if options.peer_default:
        engines.append(Engine("vllm_default", vllm, VLLM))
    if options.peer_llama:
        path = f"{folder}/model.gguf"
        plain = {"PYTHONPATH": ""}
        convert = [options.peer_llama, str(HERE / "to_gguf.py"), options.model, path]
        subprocess.run(convert, check=True, env=os.environ | plain)
        llama = [options.peer_llama, str(HERE / "llama_worker.py"), path]
        engines.append(Engine("llama_cpp", llama, plain))
    return engines


def tuned(python: str) -> dict[str, str]:
    """vLLM's best settings here: all cores, and Intel's OpenMP if its package brought it."""
    cores = sorted(os.sched_getaffinity(0))
    env = VLLM | {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    for library in Path(python).parent.parent.rglob("libiomp5.so"):
        env["LD_PRELOAD"] = str(library)
        break
    return env


class Limits:
    """Seconds below which no engine can be that reads every weight once per step."""

    def __init__(self, model: str):
        shape = ModelShape.from_folder(Path(model))
        width = shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads)
        layer = shape.hidden_size * (
            width + shape.num_heads * shape.head_dim + 3 * shape.intermediate_size
        )
        self._body, self._head = shape.num_layers * layer, shape.vocab_size * shape.hidden_size

    def seconds(self, case: Case, rates: Rates) -> float:
        """For a whole case at these rates."""
        prefill = self._step(case.prompts * case.inputs, case.prompts, rates)
        return prefill + (case.outputs - 1) * self._step(case.prompts, case.prompts, rates)

    def _step(self, tokens: int, sampled: int, rates: Rates) -> float:
        work = 2 * (self._body * tokens + self._head * sampled) / rates.multiply
        return max(work, 2 * (self._body + self._head) / rates.read)


class Bench:
    """Runs cases on all engines in turn."""

    def __init__(self, engines: list[Engine], model: str):
        self._engines = engines
        self._limits = Limits(model)
        set_num_threads(available_cores())
        choose_isa()
        self._probe = Probe()

    def warm_up(self) -> None:
        """The first run of any engine is slower."""
        for engine in self._engines:
            engine.run(Case(2, 32, 8), 7)

    def measure(self, name: str, rounds: int, seed: int) -> dict[str, dict]:
        """Seconds and rate of each engine, and what quire reached of the limit."""
        case = CASES[name]
        seconds: dict[str, list[float]] = {engine.name: [] for engine in self._engines}
        limits = []
        for number in range(rounds):
            # Whoever begins changes, so that none always follows the other.
            for engine in self._engines[:: 1 if number % 2 else -1]:
                time.sleep(PAUSE)
                before = self._probe.measure()
                seconds[engine.name].append(engine.run(case, 1000 * number + seed))
                if engine.name == "quire":
                    rates = before.mean(self._probe.measure())
                    limits.append((self._limits.seconds(case, rates), rates))
        result = {
            engine: {
                "seconds": [round(s, 3) for s in values],
                "tokens_per_second": round(case.tokens / statistics.median(values), 1),
            }
            for engine, values in seconds.items()
        }
        result["limit"] = {
            "seconds": [round(limit, 3) for limit, _ in limits],
            "gb_per_second": [round(rates.read / 1e9, 1) for _, rates in limits],
            "gflop_per_second": [round(rates.multiply / 1e9) for _, rates in limits],
            "fraction": round(
                statistics.median(
                    limit / ours for (limit, _), ours in zip(limits, seconds["quire"], strict=True)
                ),
                3,
            ),
        }
        print(name, json.dumps(result), file=sys.stderr, flush=True)
        return result


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


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    about = dict(line.split("\t:", 1) for line in reversed(lines) if "\t:" in line)
    about = {key.strip(): value.strip() for key, value in about.items()}
    name = about.get("model name", platform.processor())
    if "cpu family" in about:
        name += f" (family {about['cpu family']}, model {about['model']})"
    return {
        "cpu": name,
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
    parser.add_argument("--peer-llama", metavar="PYTHON", help="Python that can import llama_cpp")
    parser.add_argument(
        "--peer-default", action="store_true", help="vLLM once more, as it is out of the box"
    )
    parser.add_argument("--cases", default=",".join(CASES), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one object with everything")
    parser.add_argument("--verbose", action="store_true", help="show what the engines log")
    options = parser.parse_args()
    names = options.cases.split(",")
    if options.peer_default and not options.peer_vllm:
        parser.error("--peer-default needs --peer-vllm")
    unknown = set(names) - set(CASES)
    if unknown:
        parser.error(f"unknown cases {sorted(unknown)}; there are {', '.join(CASES)}")
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        engines = start_engines(options, folder)
        bench = Bench(engines, options.model)
        bench.warm_up()
        results = {
            name: bench.measure(name, options.rounds, seed) for seed, name in enumerate(names)
        }
        for engine in engines:
            engine.close()
    report = {
        "machine": machine(),
        "commit": commit(),
        "versions": {engine.name: engine.about for engine in engines},
        "model": Path(options.model).name,
        "ready_seconds": {engine.name: round(engine.ready_seconds, 2) for engine in engines},
        "results": results,
        "ratios": ratios(results, engines),
    }
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
