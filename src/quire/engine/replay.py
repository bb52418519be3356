"""Runs a recording on a real engine, step by step: the model computes, and every request gets the
tokens that the recording forces, so that the scheduler has the same to decide.

Knows no files.
"""

from __future__ import annotations

import time
from typing import Any

from quire.config import EngineConfig
from quire.core.batch import BatchResult, ScheduledBatch
from quire.core.facts import Fact
from quire.engine.core import EngineCore
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError
from quire.executor.base import ComputedBatch, Executor, ExecutorInfo, make_executor
from quire.params import SamplingParams
from quire.sim.sequences import Sequences
from quire.sim.simulator import kept_params
from quire.sim.step_time import StepShape, shape_of
from quire.utils.timing import ManualClock
from quire.workload.trace import Trace, TraceRequest, TraceStep


class ForcingExecutor:
    """Runs batches on another executor, and puts other tokens in the place of those sampled. What
    the model computes is as much as ever; what it says is of no interest."""

    max_concurrent_batches = 1

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.forced: dict[str, list[int]] = {}
        """By request, the tokens that it gets; after them, those that are sampled."""
        self._given: dict[str, int] = {}
        self.shape = StepShape(0, 0, 0, 0, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, progress: Any = None) -> ExecutorInfo:
        """Load the model."""
        return self._inner.start(progress)

    def submit(self, batch: ScheduledBatch) -> ComputedBatch:
        """Run a batch."""
        result: BatchResult = self._inner.submit(batch).result()
        sampled = result.sampled_token_ids
        self.shape = shape_of(batch, len(sampled))
        for name in sampled:
            at = self._given.get(name, 0)
            if at < len(self.forced.get(name, ())):
                sampled[name] = [self.forced[name][at]]
            self._given[name] = at + 1
        return ComputedBatch(result)


class RealEngine:
    """An engine core with its model, as `quire.sim.lockstep.Driven` wants it. Its clock goes by the
    recording, because policies go by the clock.

    Args:
        trace: With its requests.
        config: As it was recorded.

    Raises:
        StartupError: the engine cannot start.
    """

    def __init__(self, trace: Trace, config: EngineConfig) -> None:
        shape = config.model.read_shape()
        resolved, _ = config.resolve(shape)
        self._sequences = Sequences(trace.requests, trace.header.block_size, shape.vocab_size)
        self._clock = ManualClock()
        self._executor = ForcingExecutor(make_executor(resolved, shape))
        self._core = EngineCore(config, executor=self._executor, clock=self._clock)
        self.seconds = 0.0
        """That steps took, here and now."""

    @property
    def is_busy(self) -> bool:
        """Whether there are requests."""
        return bool(self._core.scheduler.requests)

    def set_clock(self, time: float) -> None:
        """Set the scheduler's clock ahead."""
        self._clock.advance(max(0.0, time - self._clock.now()))

    def add(
        self, traced: TraceRequest, name: str, arrived: Fact, *, endless: bool, compiling: bool
    ) -> None:
        """Queue it.

        Raises:
            ConfigError: it waited for a grammar, which no recording has.
        """
        if compiling:
            raise ConfigError(
                "the recording has structured outputs, and their grammars are not in it: replay it "
                "on the simulator"
            )
        prompt, made = self._sequences.make(traced, arrived.b > 0)
        output = made or []
        self._executor.forced[name] = output[arrived.b :]
        most = None if endless else max(1, traced.output_len)
        params = SamplingParams(max_tokens=most, ignore_eos=True, seed=0, **kept_params(traced))
        self._core.add_request(
            EngineCoreRequest(
                name, name, 0, prompt, params, traced.arrival, traced.priority,
                traced.cache_salt or None, output[: arrived.b], client=traced.key,
            )
        )  # fmt: skip

    def finish(self, name: str) -> None:
        """Abort it."""
        self._core.abort_requests([name])

    def compiled(self, name: str) -> None:
        """There are no grammars."""

    def set_limits(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Change them."""
        self._core.scheduler.set_limits(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )

    def drop_cache(self, *, only_free: bool) -> None:
        """Empty the prefix cache."""
        scheduler = self._core.scheduler
        (scheduler.drop_free_content if only_free else scheduler.reset_prefix_cache)()

    def step(self, recorded: TraceStep) -> tuple[StepShape, bytes]:
        """Take a step."""
        started = time.perf_counter()
        stats = self._core.step()[1]
        self.seconds += time.perf_counter() - started
        self.set_clock(recorded.start + recorded.seconds)
        return self._executor.shape, stats.facts

    def shutdown(self) -> None:
        """Let go of the model."""
        self._core.shutdown()
