"""What a step costs, in microseconds of CPU time.

The scheduler's alone; `LLM`'s with an executor that computes nothing; and with the embedded model.

    python benchmarks/step_cost.py                        a table
    python benchmarks/step_cost.py --against OTHER/src    paired with another checkout, in turns:
                                                          the ratio, and its 95 % interval
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import paired

SCHEDULED = (64, 256, 1024, 4096)
ENGINE = (1, 256)
MODEL = (1, 32)
STEPS = {1: 400, 32: 100, 64: 200, 256: 100, 1024: 40, 4096: 20}
"""Steps that are measured, by the number of requests."""


def measured(step: Callable[[], object], steps: int) -> float:
    """Microseconds of the median step."""
    gc.collect()
    times = []
    for _ in range(steps):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return 1e6 * statistics.median(times)


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def of_scheduler(count: int) -> tuple[float, str]:
    """One step with so many decodes."""
    from quire.config.scheduler import SchedulerConfig
    from quire.core.batch import BatchResult
    from quire.core.kv.manager import KVCacheManager
    from quire.core.request import Request
    from quire.core.scheduler import Scheduler
    from quire.params import SamplingParams

    config = SchedulerConfig(max_num_batched_tokens=count * 64, max_num_seqs=count)
    scheduler = Scheduler(config, KVCacheManager(count * 40, 16, max_model_len=4096))
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    names = [f"request-{i}" for i in range(count)]
    for i, name in enumerate(names):
        scheduler.add_request(Request(name, [i % 2000, i // 2000, *range(62)], params))

    def step() -> None:
        batch = scheduler.schedule()
        result = BatchResult({name: [7] for name in names})
        outputs = scheduler.update(batch, result)
        scheduler.make_stats(batch, result, outputs)

    step()
    cost = measured(step, STEPS[count])
    tables = [scheduler.kv.get_block_ids(name) for name in names]
    return cost, digest(tables)


def outputs_of(engine: Any, count: int, steps: int, prompts: list[Any]) -> tuple[float, str]:
    from quire.params import SamplingParams

    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=steps + 60, ignore_eos=True, seed=i)
        engine.add_request(f"r{i}", prompt, params)
    seen: dict[str, str] = {}

    def step() -> None:
        for output in engine.step():
            seen[output.request_id] = output.outputs[0].text

    while len(seen) < count:
        step()
    cost = measured(step, steps)
    engine.shutdown()
    return cost, digest(sorted(seen.items()))


def of_engine(count: int) -> tuple[float, str]:
    """One step of `LLMEngine` over an executor that gives tokens without computing them."""
    paired.tests_of("engine")
    from fake_executor import FakeExecutor
    from quire.config import EngineConfig
    from quire.engine.llm_engine import LLMEngine

    fake = FakeExecutor(lambda prompt, n: 100 + (prompt[0] + n) % 900, num_blocks=count * 60 + 10)
    config = EngineConfig.from_options(max_num_seqs=count, max_num_batched_tokens=8192)
    engine = LLMEngine(config, executor=fake)
    prompts = [{"prompt_token_ids": [100 + i, *range(200, 230)]} for i in range(count)]
    return outputs_of(engine, count, STEPS[count], prompts)


def of_model(count: int) -> tuple[float, str]:
    """One step of `LLMEngine` over the embedded model."""
    from quire.config import EngineConfig
    from quire.engine.llm_engine import LLMEngine

    engine = LLMEngine(EngineConfig.from_options(max_num_seqs=count))
    prompts = [f"The capital of country number {i} is" for i in range(count)]
    return outputs_of(engine, count, STEPS[count], prompts)


def work() -> paired.Costs:
    """Measure this checkout once."""
    costs = {f"scheduler, {n} decodes": of_scheduler(n) for n in SCHEDULED}
    costs |= {f"engine without a model, {n} running": of_engine(n) for n in ENGINE}
    return costs | {f"embedded model, {n} running": of_model(n) for n in MODEL}


if __name__ == "__main__":
    paired.main(__file__, str(__doc__), work)
