"""OpenVINO GenAI in a process: loads an exported folder, then runs each case it is sent.

    python openvino_worker.py FOLDER

Its pipeline with continuous batching, on all cores, computing in bf16 with the keys and values of
its own default.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai

CACHE_GIB = 4
BUDGET = 2048
"""Tokens of a step."""


def main() -> None:
    """Say what runs, then run what is asked."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    limits = genai.SchedulerConfig()
    limits.cache_size, limits.max_num_batched_tokens = CACHE_GIB, BUDGET
    limits.max_num_seqs, limits.enable_prefix_caching = 256, False
    cores = len(os.sched_getaffinity(0))
    hints = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": cores}
    pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], limits, "CPU", hints)
    about = {
        "openvino": genai.__version__,
        "runtime": ov.get_version(),
        "python": sys.version.split()[0],
        "settings": f"cache_size={CACHE_GIB} max_num_batched_tokens={BUDGET} "
        + " ".join(f"{name}={value}" for name, value in hints.items()),
    }
    answers.write(json.dumps(about) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps({"seconds": run(pipeline, json.loads(line))}) + "\n")


def run(pipeline: genai.ContinuousBatchingPipeline, job: dict[str, int]) -> float:
    """Seconds for a case."""
    numbers = random.Random(job["seed"])
    low, high = min(10, job["vocab"] // 2), min(8000, job["vocab"])
    wanted = genai.GenerationConfig()
    wanted.max_new_tokens = wanted.min_new_tokens = job["out"]
    wanted.ignore_eos, wanted.do_sample = True, False
    prompts = [
        ov.Tensor(
            np.array([[numbers.randrange(low, high) for _ in range(job["in"])]], dtype=np.int64)
        )
        for _ in range(job["prompts"])
    ]
    start = time.perf_counter()
    results = pipeline.generate(prompts, [wanted] * len(prompts))
    seconds = time.perf_counter() - start
    assert all(len(result.m_generation_ids[0]) == job["out"] for result in results)
    return seconds


if __name__ == "__main__":
    main()
