"""Microseconds the scheduler itself takes, without any model.

Two figures: one step (schedule, update, facts) with N decode requests running, and the admission
of one request of 1024 tokens of which half hit the prefix cache, from building the request to its
place in a batch. Processor time of one thread, medians.

    python benchmarks/scheduler_cost.py            a table
    python benchmarks/scheduler_cost.py --json     one JSON object
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Sequence

from quire.config.scheduler import SchedulerConfig
from quire.core.batch import BatchResult
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request, RequestStatus
from quire.core.scheduler import Scheduler
from quire.params import SamplingParams

RUNNING = (64, 256, 1024, 4096)
PROMPT = 512
BLOCK = 16
ADMITTED = 1000
ADMITTED_PROMPT = 1024
BATCH = 8
"""Requests admitted per step while admission is timed."""


def make_scheduler(num_blocks: int, budget: int, seqs: int) -> Scheduler:
    kv = KVCacheManager(num_blocks, BLOCK, max_model_len=8192)
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=seqs)
    return Scheduler(config, kv, max_model_len=8192)


def step_us(running: int, steps: int = 80) -> float:
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    gc.freeze()
    steps = {str(n): round(step_us(n), 1) for n in RUNNING}
    result = {"step_us": steps, "admit_us_per_request": round(admit_us(), 1)}
    if options.json:
        print(json.dumps(result))
        return
    print("running   us per step   us per request")
    for count, cost in steps.items():
        print(f"{count:>7} {cost:>13.1f} {cost / int(count):>16.2f}")
    print(f"admission: {result['admit_us_per_request']} us per request of {ADMITTED_PROMPT} tokens")


if __name__ == "__main__":
    main()
