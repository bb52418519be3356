"""quire or vLLM in a process: loads a model, then runs each case it is sent.

    python llm_worker.py PACKAGE MODEL CONTEXT [OPTIONS]

PACKAGE is `quire` or `vllm`: both have the same `LLM`. OPTIONS are more of its
options, as JSON. What the engine itself prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from typing import Any

SETTINGS = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE", "LD_PRELOAD")


def main() -> None:
    """Say what runs, then run what is asked."""
    package, model, context, *more = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = importlib.import_module(package)
    kept: dict[str, Any] = json.loads(more[0]) if more else {}
    llm = engine.LLM(model, max_model_len=int(context), dtype="bfloat16", **kept)
    about: dict[str, Any] = {
        name: str(importlib.import_module(name).__version__) for name in (package, "torch")
    }
    about["python"] = sys.version.split()[0]
    about["settings"] = f"max_model_len={context} dtype=bfloat16" + "".join(
        [f" {name}={value}" for name, value in kept.items()]
        # Of a library its name: where it lies is this machine's own business.
        + [f" {n}={os.path.basename(os.environ[n])}" for n in SETTINGS if os.environ.get(n)]
    )
    if package == "quire":
        about["work"] = importlib.import_module("quire.bench.engine.limit").work_of(llm.llm_engine)
    answers.write(json.dumps(about) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps({"seconds": run(engine, llm, json.loads(line))}) + "\n")


def run(engine: Any, llm: Any, job: dict[str, int]) -> float:
    """Seconds for a case."""
    numbers = random.Random(job["seed"])
    low, high = min(10, job["vocab"] // 2), min(8000, job["vocab"])
    prompts = [
        {"prompt_token_ids": [numbers.randrange(low, high) for _ in range(job["in"])]}
        for _ in range(job["prompts"])
    ]
    params = engine.SamplingParams(max_tokens=job["out"], temperature=0, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(o.outputs[0].token_ids) == job["out"] for o in outputs)
    return seconds


if __name__ == "__main__":
    main()
