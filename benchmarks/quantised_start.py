"""What the start of a quantised engine takes: memory at its peak, and time.

    python benchmarks/quantised_start.py --model DIR [--rounds N] [--schemes int8,int4,...] [--json]

DIR has an unquantised checkpoint, which is quantised online; a copy that `quire quantize --scheme`
would write is made of it without calibration (rounded to the nearest) and started too: `int8
checkpoint`, `int4 checkpoint`. Every start is a process of its own, whose anonymous memory is read
from outside every few milliseconds. `peak` is the most above what the process had when torch and
quire were imported and the kernels had run once. Promised is a peak of at most the packed weights
and the KV cache, and a tenth of both. Schemes take turns in each round; seconds are medians, and
those `of bf16` the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 1.1
POLL = 0.003
CHILD = """
import sys, json, time
import torch
from quire import LLM
from quire.kernels.dispatch import default_ops
ops = default_ops()
ops.linear(torch.ones(4, 64).bfloat16(), ops.prepare_linear([torch.ones(64, 64).bfloat16()]))
options = json.loads(sys.argv[1])
print("idle", flush=True)
sys.stdin.readline()
started = time.perf_counter()
llm = LLM(**options)
seconds = time.perf_counter() - started
info = llm.llm_engine.core.info
found = {"seconds": seconds, "weights": info.weight_bytes, "kv": info.kv_cache_bytes}
print(json.dumps(found), flush=True)
sys.stdin.readline()
"""


def held(pid: int) -> int:
    """Bytes of anonymous memory of a process, shared or not."""
    fields = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    named = {"RssAnon": 0, "RssShmem": 0} | {
        line.split(":")[0]: line.split()[1] for line in fields if line.startswith("Rss")
    }
    return 1024 * (int(named["RssAnon"]) + int(named["RssShmem"]))


def start(options: dict) -> dict[str, float]:
    """One start."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(options)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert child.stdin and child.stdout
    assert child.stdout.readline() == "idle\n", "the process did not get as far as its imports"
    idle = peak = held(child.pid)
    child.stdin.write("\n")
    child.stdin.flush()
    os.set_blocking(child.stdout.fileno(), False)
    line = ""
    while not line:
        if child.poll() is not None:
            raise SystemExit(f"the engine did not start with {options}")
        peak = max(peak, held(child.pid))
        time.sleep(POLL)
        line = child.stdout.readline()
    after = held(child.pid)
    child.stdin.close()
    child.wait()
    said = json.loads(line)
    return {**said, "peak": peak - idle, "after": after - idle}


def written(model: Path, scheme: str, out: Path) -> Path:
    """A copy with codes rounded to the nearest."""
    from quire.compress.codes import int4_codes, int8_codes
    from quire.compress.writer import write_checkpoint
    from quire.weights.files import SafetensorsCheckpoint

    with SafetensorsCheckpoint(model) as checkpoint:

        def codes_of(layer: str):
            stored = checkpoint.tensors[f"{layer}.weight"]
            if len(stored.shape) != 2 or not layer.endswith("proj"):
                return None
            weight = checkpoint.read(f"{layer}.weight")
            if scheme == "int8":
                return int8_codes(weight, weight.dtype)
            return int4_codes(weight, 32, weight.dtype)

        out.mkdir()
        write_checkpoint(checkpoint, model, out, codes_of, ["lm_head"], lambda *_: None)
    return out


def measure(model: str, schemes: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """By scheme."""
    common = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, dict] = {"bf16": {"model": model}}
        for name in schemes:
            if name.endswith(" checkpoint"):
                kind = name.split()[0]
                given[name] = {"model": str(written(Path(model), kind, Path(folder) / kind))}
            else:
                given[name] = {"model": model, "quantization": name}
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in given}
        for turn in range(rounds + 1):
            for name, options in given.items():
                found = start({**common, **options})
                if turn:  # the first reads files into memory
                    runs[name].append(found)
    return {name: row(of, runs["bf16"]) for name, of in runs.items()}


def row(runs: list[dict[str, float]], plain: list[dict[str, float]]) -> dict[str, float]:
    """What is told of a scheme."""
    peak, weights, kv = max(run["peak"] for run in runs), runs[0]["weights"], runs[0]["kv"]
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(runs, plain, strict=True)]
    return {
        "weights": weights,
        "peak": peak,
        "after": max(run["after"] for run in runs),
        "kv": kv,
        "share": peak / (weights + kv),
        "seconds": statistics.median(run["seconds"] for run in runs),
        "times_bf16": statistics.median(ratios),
    }


def main() -> int:
    """Print a table; 1 if a peak is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schemes", default="int8,int4,int8 checkpoint,int4 checkpoint")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measure(given.model, given.schemes.split(","), given.rounds)
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        print("| | weights, MB | peak, MB | KV, MB | peak / (weights + KV) | start, s | of bf16 |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        for name, r in found.items():
            sizes = " | ".join(f"{r[what] / 1e6:.0f}" for what in ("weights", "peak", "kv"))
            print(f"| {name} | {sizes} | {r['share']:.2f} | {r['seconds']:.2f} | "
                  f"{r['times_bf16']:.2f} |")  # fmt: skip
    return int(any(r["share"] > LIMIT for name, r in found.items() if name != "bf16"))


if __name__ == "__main__":
    sys.exit(main())
