"""How much slower a request is that comes to an engine which had nothing to do.

    python benchmarks/after_idle.py                 # the embedded model, two minutes
    python benchmarks/after_idle.py --model DIR     # for example of make_model.py

Each request comes so many seconds after the engine has answered another one, in an order that
changes. Printed are means, in milliseconds: its way to the engine, which is a process of its own,
its first step, and the way of its first token back. Where a machine is shared, others use the same
caches meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from quire.config import EngineConfig
from quire.config.locate import located
from quire.engine.async_llm import AsyncLLM
from quire.engine.calibration import recorded_engine
from quire.params import RequestOutputKind, SamplingParams
from quire.workload.trace import Trace, read_trace

BEFORE = 256
"""Tokens of the prompt that the engine was busy with before its rest."""


async def first_token(llm: AsyncLLM, name: str, tokens: int) -> float:
    """Ask; returns when its first token came."""
    prompt = [random.randrange(llm.info["vocab_size"]) for _ in range(tokens)]
    params = SamplingParams(max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    came = [time.monotonic() async for _ in llm.generate(prompt, params, name)]
    return came[0]


async def run(
    config: EngineConfig, path: Path, plan: list[tuple[int, float]]
) -> tuple[Trace, list[float]]:
    """What was recorded, and when each first token after a rest came."""
    came = []
    async with recorded_engine(config, path) as llm:
        await first_token(llm, "warm-up", BEFORE)
        for number, (tokens, idle) in enumerate(plan):
            await first_token(llm, f"before-{number}", BEFORE)
            await asyncio.sleep(idle)
            came.append(await first_token(llm, f"after-{number}", tokens))
    return read_trace(path), came


def parts(trace: Trace, came: list[float]) -> list[tuple[float, float, float]]:
    """Of each request after a rest: milliseconds of its way, its first step and its way back."""
    requests = sorted(trace.requests, key=lambda request: request.arrival)[2::2]
    starts = [step.start for step in trace.steps]
    found = []
    for request, at in zip(requests, came, strict=True):
        step = trace.steps[bisect.bisect_left(starts, request.arrival)]
        back = at - trace.header.origin - step.start - step.seconds
        found.append((1e3 * (step.start - request.arrival), 1e3 * step.seconds, 1e3 * back))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 600], help="of prompts")
    parser.add_argument("--idle", type=float, nargs="+", default=[0, 0.01, 0.03, 0.1, 0.3, 1, 3])
    parser.add_argument("--times", type=int, default=10, help="of each")
    options = parser.parse_args()
    config = located(EngineConfig.from_options(model=options.model, max_model_len=2048))
    plan = [(n, idle) for n in options.tokens for idle in options.idle] * options.times
    random.Random(0).shuffle(plan)
    with tempfile.TemporaryDirectory() as folder:
        measured = parts(*asyncio.run(run(config, Path(folder) / "trace.jsonl", plan)))
    of_kind = defaultdict(list)
    for kind, times in zip(plan, measured, strict=True):
        of_kind[kind].append(times)
    print(f"{'tokens':>6} {'idle, s':>8} {'way in':>8} {'step':>8} {'way out':>8} {'TTFT':>8}")
    for (tokens, idle), times in sorted(of_kind.items()):
        means = [fmean(column) for column in zip(*times, strict=True)]
        shown = " ".join(f"{each:8.1f}" for each in (*means, sum(means)))
        print(f"{tokens:6} {idle:8g} {shown}")


if __name__ == "__main__":
    main()
