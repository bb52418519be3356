"""An executor that takes several batches and answers late. The toy of the executor seam."""

from __future__ import annotations

import random
from collections import deque

from quire.core.batch import BatchResult, ScheduledBatch
from quire.executor.base import Executor, ExecutorInfo, Progress


class LateBatch:
    """One batch of a `LateExecutor`."""

    def __init__(self, executor: LateExecutor, batch: ScheduledBatch) -> None:
        self.executor, self.batch = executor, batch
        self.done: BatchResult | None = None

    def result(self) -> BatchResult:
        while self.done is None:
            self.executor.run_next()
        assert self.executor.taken.popleft() is self, "results are asked for in order"
        return self.done


class LateExecutor:
    """Runs batches on another executor, which takes one at a time: some when they are submitted,
    some only when their result is asked for. Of those taken back, some have run."""

    def __init__(self, inner: Executor, depth: int, seed: int = 0) -> None:
        self.inner, self.max_concurrent_batches = inner, depth
        self.taken: deque[LateBatch] = deque()
        self.deepest = 0
        self.eager = 0.3
        """Share of batches that run when they are submitted."""
        self._rng = random.Random(seed)

    def start(self, progress: Progress | None = None) -> ExecutorInfo:
        return self.inner.start(progress)

    def submit(self, batch: ScheduledBatch) -> LateBatch:
        assert len(self.taken) < self.max_concurrent_batches, "more than it takes"
        self.taken.append(LateBatch(self, batch))
        self.deepest = max(self.deepest, len(self.taken))
        late = self.taken[-1]
        while late.done is None and self._rng.random() < self.eager:
            self.run_next()
        return late

    def run_next(self) -> None:
        late = next(one for one in self.taken if one.done is None)
        late.done = self.inner.submit(late.batch).result()

    def reset(self) -> None:
        self.taken.clear()
        self.inner.reset()

    def start_profile(self) -> None:
        self.inner.start_profile()

    def stop_profile(self) -> None:
        self.inner.stop_profile()

    def shutdown(self) -> None:
        self.inner.shutdown()
