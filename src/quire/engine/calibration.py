"""Measures how long steps take on this machine, with steps of designed kinds.

The engine runs in this process. Rounds differ in requests, prompt lengths and token budget, small
ones first; a round that would take too much of the time is left out. Then a short load on an engine
core in its own process, as a server has it, tells what passes between steps, and how much longer
steps take beside a process that wants the same processors. Knows no files.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from quire.config import EngineConfig
from quire.core.batch import ScheduledBatch
from quire.engine.core import EngineCore
from quire.engine.messages import EngineCoreRequest
from quire.executor.base import Executor, ExecutorInfo, PendingBatch, make_executor
from quire.params import SamplingParams
from quire.sim.lockstep import Lockstep, SimulatedEngine, measured_overheads
from quire.sim.scenario import pool_of
from quire.sim.step_time import Overheads, StepShape, StepTimeModel, fit, shape_of
from quire.utils.math import cdiv
from quire.workload.trace import read_trace

ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS: Final = (8, 64, 256, 1024, 4096)
BUDGETS: Final = (32, 128, 512, 2048)
DECODES: Final = 12
"""Tokens that each request of a round gets."""
SHARE: Final = 0.15
"""Of the time, that one round may take at most."""
FIRST: Final = 8
"""Rounds that run in the order of their size."""
TIMES: Final = 20
"""How often all rounds run, if there is time."""
SERVED_ROWS: Final = (1, 4, 16, 64)
SERVED_PROMPTS: Final = (8, 64, 256)
SERVED_TOKENS: Final = 40
SERVED_SHARE: Final = 0.15
"""Of the time, for the load on a core in its own process; all its rounds run at least once."""

Told = Callable[[str, float], None]
"""Called with what is going on, and the share that is done."""


class Watching:
    """An executor that notes what was in the batch it ran."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.shape = StepShape(0, 0, 0, 0, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def max_concurrent_batches(self) -> int:
        """As it says."""
        return self._inner.max_concurrent_batches

    def start(self, progress: Any = None) -> ExecutorInfo:
        """Load the model."""
        return self._inner.start(progress)

    def submit(self, batch: ScheduledBatch) -> PendingBatch:
        """Note and run."""
        self.shape = shape_of(batch)
        return self._inner.submit(batch)


class Round(NamedTuple):
    """Requests that run together."""

    rows: int
    context: int
    """Tokens of each prompt."""
    budget: int
    """`max_num_batched_tokens`."""

    @property
    def tokens(self) -> int:
        """All that it computes."""
        return self.rows * (self.context + DECODES)


def rounds(max_num_seqs: int, max_model_len: int, kv_tokens: int, budget: int) -> list[Round]:
    """The rounds that fit, the smallest first."""
    contexts = [c for c in CONTEXTS if c + DECODES < max_model_len]
    made = [
        Round(rows, context, min(chunk, budget))
        for rows, context, chunk in itertools.product(ROWS, contexts, BUDGETS)
        if rows <= min(max_num_seqs, chunk) and rows * (context + DECODES + 128) < kv_tokens
    ]
    return sorted(dict.fromkeys(made), key=lambda r: (r.tokens, r.budget))


class Calibration:
    """Measures one engine.

    Args:
        config: As given by the user, with the model on this machine.
        seconds: For the steps, warm-up included.
        tell: Hears how far it is.

    Raises:
        StartupError: the engine cannot start.
    """

    def __init__(self, config: EngineConfig, seconds: float, tell: Told) -> None:
        self._seconds, self._tell = seconds, tell
        self._given = config
        # Every prompt must be computed, whatever came before it.
        config = replace(config, cache=replace(config.cache, enable_prefix_caching=False))
        shape = config.model.read_shape()
        resolved, _ = config.resolve(shape)
        self._executor = Watching(make_executor(resolved, shape))
        self._core = EngineCore(config, executor=self._executor)
        self._rng = random.Random(0)
        self._names = itertools.count()
        self.shapes: list[StepShape] = []
        self.times: list[float] = []

    def run(self) -> StepTimeModel:
        """Measure, and fit a model."""
        try:
            self._steps()
        finally:
            self._core.shutdown()
        self._tell("in a process of its own", 1.0 - SERVED_SHARE)
        served = asyncio.run(serve(self._given, SERVED_SHARE * self._seconds))
        info = self._core.info
        about = {
            "source": "quire calibrate",
            "model": self._given.model.names[0],
            "device": info.place,
            "dtype": info.dtype,
            "steps": len(self.shapes),
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        model = fit(self.shapes, self.times, served.overheads, about)
        errors = [
            abs(model.seconds(shape) / seconds - 1)
            for shape, seconds in zip(self.shapes, self.times, strict=True)
        ]
        factor = served.factor(model)
        model.about["median_error"] = round(median(errors), 4)
        model.about["served"] = round(factor, 3)
        return model.scaled(factor)

    def _steps(self) -> None:
        config, kv = self._core.config, self._core.kv
        length = config.model.max_model_len
        assert length is not None, "resolve() settles it"
        for _ in range(2):  # warm-ups: weights are read from disk, buffers are made
            self._round(Round(2, 8, config.scheduler.max_num_batched_tokens))
            self._forget()
        started, most = time.monotonic(), (1.0 - SERVED_SHARE) * self._seconds
        waiting = rounds(
            config.scheduler.max_num_seqs, length, kv.capacity_tokens,
            config.scheduler.max_num_batched_tokens,
        )  # fmt: skip
        for one in self._again_and_again(waiting):
            left = most - (time.monotonic() - started)
            if left <= 0:
                break
            if self._cost(one) > min(left, max(SHARE * self._seconds, 0.5)):
                continue
            self._round(one)
            done = (1.0 - SERVED_SHARE) * (1.0 - left / most)
            self._tell(f"{one.rows} x {one.context} tokens", done)

    def _forget(self) -> None:
        self.shapes.clear()
        self.times.clear()

    def _cost(self, one: Round) -> float:
        """Seconds that a round will take, by the steps so far. Larger prompts cost less per token,
        so the estimate is too high until some have run, and falls with each that is larger."""
        measured = list(zip(self.shapes, self.times, strict=True))
        step = min((s for shape, s in measured), default=0.0)
        token = min((s / shape.tokens for shape, s in measured), default=0.0)
        chunks = cdiv(one.rows * one.context, one.budget)
        decodes = max(step, token * one.rows) * DECODES
        return decodes + max(step * chunks, token * one.rows * one.context)

    def _again_and_again(self, waiting: list[Round]) -> Iterator[Round]:
        """The smallest rounds, which tell what others will cost; then all, each time in another
        order, so that what else the machine does falls on all kinds alike."""
        yield from waiting[:FIRST]
        for _ in range(TIMES):
            yield from self._rng.sample(waiting, len(waiting))

    def _round(self, one: Round) -> None:
        core = self._core
        core.scheduler.set_limits(
            max_num_batched_tokens=max(one.budget, core.scheduler.config.max_num_seqs)
        )
        vocabulary = core.info.vocab_size
        params = SamplingParams(max_tokens=DECODES, ignore_eos=True, seed=1)
        for _ in range(one.rows):
            prompt = [self._rng.randrange(vocabulary) for _ in range(one.context)]
            name = f"calibration-{next(self._names)}"
            core.add_request(EngineCoreRequest(name, name, 0, prompt, params, 0.0))
        while core.scheduler.requests:
            stats = core.step()[1]
            if self._executor.shape.tokens:
                self.shapes.append(self._executor.shape)
                self.times.append(stats.step_seconds)


@dataclass(frozen=True)
class Served:
    """Steps of a core in its own process."""

    overheads: Overheads
    shapes: list[StepShape]
    times: list[float]

    def factor(self, model: StepTimeModel) -> float:
        """How many times as long they took as `model` says, decodes and prompts counting alike."""
        ratios = []
        for prompts in (False, True):
            some = [
                (seconds, model.seconds(shape))
                for shape, seconds in zip(self.shapes, self.times, strict=True)
                if (shape.prefills > 0) is prompts
            ]
            if said := sum(expected for _, expected in some):
                ratios.append(sum(seconds for seconds, _ in some) / said)
        return fmean(ratios) if ratios else 1.0


async def serve(config: EngineConfig, seconds: float) -> Served:
    """Put a load on a core in its own process, and see how long its steps take and what passes
    beside them."""
    from quire.engine.async_llm import AsyncLLM

    vocabulary, rng = config.model.read_shape().vocab_size, random.Random(1)
    seen: dict[str, float] = {}
    sent: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        observed = replace(config.observability, record=str(path))
        llm = await AsyncLLM.start(replace(config, observability=observed))
        await llm.wait_ready()
        try:

            async def one(name: str, length: int) -> None:
                params = SamplingParams(max_tokens=SERVED_TOKENS, ignore_eos=True)
                prompt = [rng.randrange(vocabulary) for _ in range(length)]
                sent[name] = time.monotonic()
                async for _ in llm.generate(prompt, params, name):
                    seen.setdefault(name, time.monotonic())

            started = time.monotonic()
            for turn in itertools.count():
                for rows, length in itertools.product(SERVED_ROWS, SERVED_PROMPTS):
                    if turn == 0 or time.monotonic() - started < seconds:
                        names = (f"{turn}-{rows}-{length}-{i}" for i in range(rows))
                        await asyncio.gather(*(one(name, length) for name in names))
                if time.monotonic() - started >= seconds:
                    break
        finally:
            await llm.shutdown()
        trace = read_trace(path)
    recorded = EngineConfig.from_dict(trace.header.config)
    replayed = list(Lockstep(trace, SimulatedEngine(trace, recorded, pool_of(trace.header.info))))
    beside = measured_overheads(trace.steps, replayed)
    arrivals = sorted(request.arrival for request in trace.requests)
    ends = sorted(step.start + step.seconds for step in trace.steps)
    origin = min(sent.values()) - arrivals[0]
    first = []
    for at in seen.values():
        before = bisect_right(ends, at - origin)
        first.append(at - origin - ends[before - 1] if before else 0.0)
    done = [step for step in replayed if step.shape.tokens]
    return Served(
        replace(beside, output=max(0.0, median(first)) if first else 0.0),
        [step.shape for step in done],
        [step.recorded.seconds for step in done],
    )
