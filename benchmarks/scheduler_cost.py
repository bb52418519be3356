"""Microseconds the scheduler itself takes, without any model.

Two figures: one step (schedule, update, facts) with N decode requests running, and the admission
of one request of 1024 tokens of which half hit the prefix cache, from building the request to its
place in a batch. Processor time of one thread, medians. With them, how the cost of a step grows
from 1,024 to 4,096 running requests.

    python benchmarks/scheduler_cost.py                        a table
    python benchmarks/scheduler_cost.py --json                 one JSON object
    python benchmarks/scheduler_cost.py --peer-vllm PYTHON     and vLLM's scheduler beside it

PYTHON is an interpreter that has vLLM 0.32; the same work is done by its scheduler and KV cache
manager in a process of its own (`peer_scheduler.py`), and the ratios are quire's cost divided by
vLLM's, from one run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.config.scheduler import SchedulerConfig
from quire.core.batch import BatchResult
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request, RequestStatus
from quire.core.scheduler import Scheduler
from quire.params import SamplingParams

RUNNING = (64, 256, 1024, 4096)
PROMPT = 512
BLOCK = 16
STEPS = 80
ADMITTED = 1000
ADMITTED_PROMPT = 1024
GROWTH = (1024, 4096)
ROUNDS = 4
BATCH = 8
"""Requests admitted per step while admission is timed."""


def make_scheduler(num_blocks: int, budget: int, seqs: int) -> Scheduler:
    kv = KVCacheManager(num_blocks, BLOCK, max_model_len=8192)
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=seqs)
    return Scheduler(config, kv, max_model_len=8192)


def step_us(running: int, steps: int = STEPS) -> float:
    """Median microseconds of a step with so many requests decoding."""
    blocks = running * ((PROMPT + 4 * steps) // BLOCK + 2)
    scheduler = make_scheduler(blocks, running * PROMPT, running)
    params = SamplingParams(max_tokens=4096, ignore_eos=True)
    names = [f"request-{i}" for i in range(running)]
    for index, name in enumerate(names):
        prompt = [index % 2000, index // 2000, *range(PROMPT - 2)]
        scheduler.add_request(Request(name, prompt, params))
    times = []
    for _ in range(steps):
        result = BatchResult({name: [7] for name in names})
        start = time.process_time()
        batch = scheduler.schedule()
        outputs = scheduler.update(batch, result)
        scheduler.make_stats(batch, result, outputs)
        times.append(time.process_time() - start)
    assert len(scheduler.running) == running
    return statistics.median(times[1:]) * 1e6


def admit_us() -> float:
    """Median microseconds to build, queue and admit a request whose first half is cached."""
    per_request = ADMITTED_PROMPT // BLOCK
    scheduler = make_scheduler(ADMITTED * per_request + 200, BATCH * ADMITTED_PROMPT, ADMITTED)
    randomness = random.Random(0)
    shared = [randomness.randrange(30000) for _ in range(ADMITTED_PROMPT // 2)]
    params = SamplingParams(max_tokens=4096, ignore_eos=True)
    prompts = [
        shared + [randomness.randrange(30000) for _ in range(ADMITTED_PROMPT // 2)]
        for _ in range(ADMITTED)
    ]
    scheduler.add_request(Request("first", [*shared, 1], params))
    scheduler.update(scheduler.schedule(), BatchResult({"first": [7]}))
    times = []
    for first in range(0, ADMITTED - 1, BATCH):
        chosen = prompts[first : first + BATCH]
        start = time.process_time()
        for index, prompt in enumerate(chosen):
            scheduler.add_request(Request(f"r{first + index}", prompt, params))
        batch = scheduler.schedule()
        times.append((time.process_time() - start) / len(chosen))
        assert len(batch.scheduled_new_reqs) == len(chosen)
        assert batch.prefix_hits == len(chosen) * ADMITTED_PROMPT // 2
        ended = {r.req_id: [7] for r in batch.scheduled_new_reqs}
        scheduler.update(batch, BatchResult(ended))
        scheduler.finish_requests(list(ended), RequestStatus.FINISHED_ABORTED)
    return statistics.median(times) * 1e6


def measure_growth() -> float:
    """How much more a running request costs among many than among fewer: 1 is linear.

    Best of several rounds in alternation: what else runs on the machine takes the caches away, and
    from the larger one more.
    """
    few, many = GROWTH
    rounds = [(step_us(few), step_us(many)) for _ in range(ROUNDS)]
    return round(min(m for _, m in rounds) / many / (min(f for f, _ in rounds) / few), 3)


def run_peer(python: str) -> dict[str, Any]:
    """The same figures for vLLM's scheduler, run by an interpreter that has it."""
    work = {
        "running": RUNNING,
        "prompt": PROMPT,
        "block": BLOCK,
        "steps": STEPS,
        "admitted": ADMITTED,
        "admitted_prompt": ADMITTED_PROMPT,
        "batch": BATCH,
    }
    # Its packages are its own: ours must not stand before them.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["VLLM_LOGGING_LEVEL"] = "ERROR"
    done = subprocess.run(
        [python, str(Path(__file__).with_name("peer_scheduler.py"))],
        input=json.dumps(work),
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode != 0:
        sys.exit(f"vLLM's scheduler did not run with {python}:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def ratios(own: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """Our cost divided by the peer's."""
    steps = {n: round(cost / peer["step_us"][n], 3) for n, cost in own["step_us"].items()}
    key = "admit_us_per_request"
    return {"step_us": steps, key: round(own[key] / peer[key], 3)}


def show(result: dict[str, Any]) -> None:
    """The figures as a table."""
    peer, share = result.get("peer"), result.get("ratios")
    print(
        "running   us per step   us per request" + ("   vLLM us per step   ratio" if peer else "")
    )
    for count, cost in result["step_us"].items():
        line = f"{count:>7} {cost:>13.1f} {cost / int(count):>16.2f}"
        if peer and share:
            line += f" {peer['step_us'][count]:>18.1f} {share['step_us'][count]:>7.3f}"
        print(line)
    few, many = GROWTH
    print(f"growth from {few} to {many} running: {result['growth']} x linear, best of {ROUNDS}")
    key = "admit_us_per_request"
    print(f"admission: {result[key]} us per request of {ADMITTED_PROMPT} tokens", end="")
    print(f"; vLLM {peer[key]} us, ratio {share[key]}" if peer and share else "")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--peer-vllm", metavar="PYTHON", help="an interpreter that has vLLM: run its scheduler, too"
    )
    options = parser.parse_args(arguments)
    gc.freeze()
    steps = {str(n): round(step_us(n), 1) for n in RUNNING}
    result: dict[str, Any] = {
        "step_us": steps,
        "growth": measure_growth(),
        "admit_us_per_request": round(admit_us(), 1),
    }
    if options.peer_vllm:
        result["peer"] = run_peer(options.peer_vllm)
        result["ratios"] = ratios(result, result["peer"])
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
