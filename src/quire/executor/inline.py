"""The executor without processes: one worker, called directly.

`LLM` uses it in the caller's process, so that a profiler sees the work; the engine-core process
uses it in its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.config import EngineConfig, ModelShape
from quire.core.batch import ScheduledBatch
from quire.executor.base import ComputedBatch, ExecutorInfo, Progress
from quire.kernels.dispatch import build_of
from quire.params import SamplingParams
from quire.worker.worker import Worker


class InlineExecutor:
    """Runs one worker in this process.

    Args:
        config: Resolved.
        shape: The model's sizes.
        proposer: Name of a row of `PROPOSERS`; `None`: no drafts.

    Raises:
        ConfigError: the device or type asked for cannot be had here, or there is no such proposer.
    """

    max_concurrent_batches: Final = 1
    """There is one worker, and it computes while the caller waits."""

    def __init__(
        self, config: EngineConfig, shape: ModelShape, proposer: str | None = None
    ) -> None:
        self._worker = Worker(config, shape, proposer)

    def start(self, progress: Progress | None = None) -> ExecutorInfo:
        """Load the model and allocate the KV cache.

        Raises:
            StartupError: configuration, files or memory do not allow it.
        """
        worker = self._worker
        plan = worker.load(progress)
        return ExecutorInfo(
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            max_model_len=worker.max_model_len,
            vocab_size=worker.shape.vocab_size,
            device=worker.device.name,
            place=worker.place,
            kernels=build_of(worker.ops),
            dtype=worker.dtype,
            weight_bytes=worker.weight_bytes,
            kv_cache_bytes=plan.bytes,
            kv_windows=plan.windows,
            num_swap_blocks=plan.num_swap_blocks,
        )

    def compile_grammar(self, params: SamplingParams) -> bool:
        """Begin to compile the grammar of a request; gives whether it is done."""
        return self._worker.grammars.begin(params)

    def check_processors(self, params: SamplingParams) -> None:
        """Ask the logits processors whether they take a request."""
        self._worker.processors.check(params)

    def wait_for_grammars(self, seconds: float) -> None:
        """Wait until one more grammar is compiled, or for so long."""
        self._worker.grammars.wait(seconds)

    def submit(self, batch: ScheduledBatch) -> ComputedBatch:
        """Run one step, here and now."""
        return ComputedBatch(self._worker.execute(batch))

    def reset(self) -> None:
        """Forget all requests; the model stays loaded."""
        self._worker.reset()

    def release_memory(self, block_ids: Sequence[int]) -> int:
        """Give the pages of KV blocks back, and the heap's; gives the bytes of the former."""
        return self._worker.release_memory(block_ids)

    def start_profile(self) -> None:
        """Begin a recording of this process."""
        self._worker.start_profile()

    def stop_profile(self) -> None:
        """End the recording and write it."""
        self._worker.stop_profile()

    @property
    def model(self) -> object:
        """The loaded model, for profilers."""
        return self._worker.model

    def shutdown(self) -> None:
        """Release the model. Safe to call twice."""
        self._worker.shutdown()
