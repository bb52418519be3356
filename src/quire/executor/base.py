"""What an engine core needs of an executor, and the table of executors.

Importing this module loads no torch: an executor is imported when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from quire.config import EngineConfig, ModelShape
from quire.core.batch import BatchResult, ScheduledBatch
from quire.params import SamplingParams
from quire.registry import Registry

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total) while loading."""


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """How the configuration was resolved on this machine."""

    num_blocks: int
    """KV blocks, the null block included."""
    block_size: int
    max_model_len: int
    vocab_size: int
    device: str
    dtype: str
    weight_bytes: int
    kv_cache_bytes: int
    kv_windows: tuple[int | None, ...] = (None,)
    """Of each group of layers that has block tables of its own, the positions a token sees."""
    num_swap_blocks: int = 0
    """Blocks of the second tier."""
    place: str = ""
    """The device and why it was chosen, for people."""
    kernels: str = ""
    """Which code computes: of another the same request may get other bits."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for messages."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ExecutorInfo:
        """The inverse of `to_dict`."""
        return cls(**{**data, "kv_windows": tuple(data["kv_windows"])})


class PendingBatch(Protocol):
    """Handle of a batch that was submitted."""

    def result(self) -> BatchResult:
        """Wait until the batch has run. Call this once per batch, in the order of submission.

        Requests that fail individually are named in the result; nothing is raised for them. If this
        raises, all batches in flight are void, and `Executor.reset` follows.
        """
        ...


@dataclass(slots=True)  # not frozen: that would make it three times as dear, once in every step
class ComputedBatch:
    """Handle of a batch that has already run."""

    batch_result: BatchResult

    def result(self) -> BatchResult:
        """What it produced."""
        return self.batch_result


class Executor(Protocol):
    """Runs batches on a model. Each rank runs them in the order of submission, because a batch may
    read what an earlier one writes and overwrite what an earlier one reads."""

    @property
    def max_concurrent_batches(self) -> int:
        """Largest number of batches in flight, at least 1. More than 1 pays where batches overlap,
        as on the stages of a pipeline. A request is in one batch at a time, except for chunks of
        its prompt."""
        ...

    def start(self, progress: Progress | None = None) -> ExecutorInfo:
        """Load the model.

        Raises:
            StartupError: configuration, files or memory do not allow it.
        """
        ...

    def compile_grammar(self, params: SamplingParams) -> bool:
        """Begin to compile the grammar of a request, unless that was done; returns at once.

        Returns:
            Whether it is done. If it failed, the request fails when it is submitted.
        """
        ...

    def wait_for_grammars(self, seconds: float) -> None:
        """Wait until one more grammar is compiled, or for so long."""
        ...

    def check_processors(self, params: SamplingParams) -> None:
        """Ask the logits processors whether they take a request; called only if there are some.

        Raises:
            ProcessorRefused: one does not.
            ProcessorFailed: one fails on it.
        """
        ...

    def submit(self, batch: ScheduledBatch) -> PendingBatch:
        """Submit a batch. At most `max_concurrent_batches` are in flight, that is without their
        result having been asked for."""
        ...

    def reset(self) -> None:
        """Forget all requests, and all batches whose result was not asked for: they may have run,
        wholly or in part, or not, and none will run later. The model stays loaded."""
        ...

    def release_memory(self, block_ids: Sequence[int]) -> int:
        """Give memory back to the machine: the heap's spare pages, and those of KV blocks whose
        content nobody needs. Called with no batch in flight.

        Args:
            block_ids: In ascending order. They stay usable: their next content brings pages anew.

        Returns:
            Bytes of the blocks' whole pages, whether they were in use or not; 0 where blocks have
            no pages of this machine.
        """
        ...

    def start_profile(self) -> None:
        """Begin a profiler recording.

        Raises:
            ConfigError: no folder is set for it.
            Conflict: one runs already.
        """
        ...

    def stop_profile(self) -> None:
        """End the recording and write it.

        Raises:
            Conflict: none runs.
        """
        ...

    def shutdown(self) -> None:
        """Release the model. Safe to call twice."""
        ...


ExecutorFactory = Callable[[EngineConfig, ModelShape], Executor]

EXECUTORS: Final[Registry[ExecutorFactory]] = Registry(
    "executor", {"inline": "quire.executor.inline:InlineExecutor"}, plugins="executor"
)


def make_executor(config: EngineConfig, shape: ModelShape, name: str = "inline") -> Executor:
    """An executor of the table.

    Args:
        config: Resolved.
        shape: The model's sizes.
        name: Its row. No option chooses it: one process runs the model.

    Raises:
        ConfigError: there is no such row.
    """
    return EXECUTORS.get(name)(config, shape)
