"""What the records cost while nobody watches.

Two figures: microseconds per step that the ring adds with 64 decode requests running (as a share
of a step of 20 ms), while it fills and once it is full; and generation with the embedded model,
records on and off.

    python benchmarks/observe_cost.py            a table
    python benchmarks/observe_cost.py --json     one JSON object
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence

from quire.config.scheduler import SchedulerConfig
from quire.core.batch import BatchResult
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.stats import StepStats
from quire.observability.records import StepRecords
from quire.params import SamplingParams

RUNNING = 64
STEP_SECONDS = 0.020
RING = 1024
LIFE = 128
"""Output tokens of a request: every other step one ends and one comes in."""


def real_steps(count: int) -> list[StepStats]:
    """Statistics of steps of the real scheduler with requests coming and going."""
    config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=RUNNING)
    scheduler = Scheduler(config, KVCacheManager(4096, 16), max_model_len=4096)
    params = SamplingParams(max_tokens=LIFE, ignore_eos=True)
    steps = []
    for number in range(count):
        if number % (LIFE // RUNNING) == 0:
            scheduler.add_request(Request(f"request-{number:08x}", [number] * 64, params))
        batch = scheduler.schedule()
        done = (scheduler.requests[i] for i in batch.num_scheduled_tokens)
        ready = [r.request_id for r in done if r.num_computed_tokens == r.num_tokens]
        result = BatchResult({name: [7] for name in ready})
        outputs = scheduler.update(batch, result)
        steps.append(scheduler.make_stats(batch, result, outputs))
    assert steps[-1].num_running >= RUNNING - 2
    return steps


def record_us() -> tuple[float, float]:
    """Mean microseconds per step: while the ring fills, and once it is full."""
    steps = real_steps(4 * RING)
    records = StepRecords(RING)
    times = []
    for step in steps:
        start = time.perf_counter()
        records.record(step, None)
        times.append(time.perf_counter() - start)
    # Means, as the cost comes in bursts; the scheduler has filled up after LIFE steps.
    return statistics.mean(times[LIFE:RING]) * 1e6, statistics.mean(times[2 * RING :]) * 1e6


def tokens_per_second(rounds: int) -> dict[str, float]:
    """Best generation speed of the embedded model with records on and off, in turns.

    The best, because whatever else the machine does only makes a round slower; and a second
    engine without records, because its distance to the first tells what the figures are worth.
    """
    from quire import LLM

    params = SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.0)
    engines = {"on": LLM(), "off": LLM(record_steps=0), "off_again": LLM(record_steps=0)}
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        turn = list(engines.items())
        for name, llm in turn[number % 3 :] + turn[: number % 3]:
            prompts = [[9 + number, 20 + i] * 8 for i in range(RUNNING)]
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if number:  # the first round warms up
                speeds[name].append(RUNNING * 32 / (time.perf_counter() - start))
    for llm in engines.values():
        llm.shutdown()
    return {name: max(values) for name, values in speeds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="rounds with the model; 0: none")
    options = parser.parse_args(arguments)
    gc.freeze()
    filling, full = record_us()
    result: dict[str, float] = {
        "filling_us": round(filling, 2),
        "full_us": round(full, 2),
        "share_of_step_percent": round(100 * full / 1e6 / STEP_SECONDS, 4),
    }
    if options.rounds:
        speed = tokens_per_second(options.rounds)
        result |= {f"tokens_per_second_{name}": round(value, 1) for name, value in speed.items()}
    if options.json:
        print(json.dumps(result))
        return
    print(f"{RUNNING} running, {LIFE} output tokens each, a ring of {RING} steps")
    print(f"ring fills: {filling:.1f} us per step; ring full: {full:.1f} us")
    print(f"that is {result['share_of_step_percent']} % of a step of {1e3 * STEP_SECONDS:.0f} ms")
    if options.rounds:
        print(
            f"embedded model: {result['tokens_per_second_on']} tokens/s with records, "
            f"{result['tokens_per_second_off']} and {result['tokens_per_second_off_again']} without"
        )


if __name__ == "__main__":
    main()
