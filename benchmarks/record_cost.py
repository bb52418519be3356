"""What `--record` costs: the same load on an engine that records and on one without, in turns.

    python benchmarks/record_cost.py [--model DIR] [--rounds 20]
    python benchmarks/record_cost.py --none      # neither records: what the machine makes of it

Both engines are up all the time (each a core in its own process, without HTTP). In each round both
get the same load, and whoever begins changes: so what else the machine does falls on both. Prints
the medians over the rounds of the ratios of with to without, and within what 95 % of the medians of
rounds drawn anew lie: seconds of the whole, and processor time of this process, where a thread
hashes and writes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from paired import interval

from quire.config import EngineConfig
from quire.config.locate import located
from quire.engine.async_llm import AsyncLLM
from quire.params import RequestOutputKind, SamplingParams

LOADS = {"32 x 64 / 64": (32, 64, 64), "8 x 512 / 32": (8, 512, 32)}
"""Requests at once x tokens in / tokens out."""


async def once(llm: AsyncLLM, load: tuple[int, int, int], seed: int) -> tuple[float, float]:
    """Seconds, and processor seconds of this process."""
    rows, length, output = load
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=output, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    prompts = [[rng.randrange(llm.info["vocab_size"]) for _ in range(length)] for _ in range(rows)]

    async def ask(number: int) -> None:
        async for _ in llm.generate(prompts[number], params, f"{seed}-{number}"):
            pass

    began, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(ask(number) for number in range(rows)))
    took = time.perf_counter() - began
    await asyncio.sleep(0.1)  # the thread that writes gets done: its time is this round's
    return took, time.process_time() - used


async def measure(config: EngineConfig, rounds: int, path: Path | None) -> None:
    observed = replace(config.observability, record=str(path) if path else None)
    recording = replace(config, observability=observed)
    engines = {}
    try:
        for name, one in (("without", config), ("with", recording)):
            engines[name] = await AsyncLLM.start(one)
            await engines[name].wait_ready()
        for what, load in LOADS.items():
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
            for seed in range(-2, rounds):  # the first two are warm-ups
                for name in list(engines)[:: 1 if seed % 2 else -1]:
                    # Prompts that neither engine has seen: nothing is in its cache.
                    both = await once(engines[name], load, hash((what, seed)) % 2**31)
                    if seed >= 0:
                        taken[name].append(both)
            for place, kind in enumerate(("seconds", "processor of this process")):
                pairs = zip(taken["with"], taken["without"], strict=True)
                ratios = [a[place] / b[place] for a, b in pairs]
                low, high = interval(ratios)
                print(
                    f"{what:<16}{kind:<28}with / without {statistics.median(ratios):.3f} "
                    f"[{low:.3f}, {high:.3f}]",
                    flush=True,
                )
    finally:
        for llm in engines.values():
            await llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--none", action="store_true", help="record in neither")
    options = parser.parse_args()
    config = located(
        EngineConfig.from_options(model=options.model, max_model_len=1024, max_num_seqs=64)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = None if options.none else Path(folder) / "trace.jsonl"
        asyncio.run(measure(config, options.rounds, path))


if __name__ == "__main__":
    main()
