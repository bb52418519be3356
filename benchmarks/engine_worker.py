"""One engine in a process: loads a model, then runs each case it is sent. See `cpu_engine.py`.

    python engine_worker.py PACKAGE MODEL

PACKAGE is `quire` or `vllm`: both have the same `LLM`. Says one line of JSON when it is ready and
one per case; what the engine itself prints goes to stderr.
"""

import importlib
import json
import os
import random
import sys
import time


def main() -> None:
    package, model = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = importlib.import_module(package)
    llm = engine.LLM(model, max_model_len=4608, dtype="bfloat16")
    about = {name: str(importlib.import_module(name).__version__) for name in (package, "torch")}
    answers.write(json.dumps(about | {"python": sys.version.split()[0]}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps({"seconds": run(engine, llm, json.loads(line))}) + "\n")


def run(engine, llm, job: dict) -> float:
    numbers = random.Random(job["seed"])
    prompts = [
        {"prompt_token_ids": [numbers.randrange(10, 8000) for _ in range(job["in"])]}
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
