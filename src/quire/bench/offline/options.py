"""What the offline benchmarks can be asked for. Apart from what measures, so that `--help` loads no
engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError
from quire.workload.options import flag_of


def _at_least(options: Any, least: dict[str, float]) -> None:
    for name, limit in least.items():
        if not (value := getattr(options, name)) >= limit:
            raise ConfigError(f"{flag_of(name)} must be at least {limit}, got {value}")


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """What to repeat. Lengths are in tokens.

    Raises:
        ConfigError: a number is out of range.
    """

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    n: int = 1
    use_beam_search: bool = False
    num_iters_warmup: int = 10
    num_iters: int = 30
    disable_detokenize: bool = False
    profile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        ones = ("input_len", "output_len", "batch_size", "n", "num_iters")
        _at_least(self, {**dict.fromkeys(ones, 1), "num_iters_warmup": 0})


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    """How to run the requests.

    Raises:
        ConfigError: a number is out of range.
    """

    n: int = 1
    """Completions of each."""
    prequeue_requests: bool = False
    """Give the engine everything before the clock starts."""
    disable_detokenize: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        _at_least(self, {"n": 1})


@dataclass(frozen=True, slots=True)
class StartupOptions:
    """How often to start.

    Raises:
        ConfigError: a number is out of range.
    """

    num_iters_cold: int = 3
    num_iters_warmup: int = 1
    num_iters_warm: int = 3
    start_timeout: float = 600.0
    """Seconds that one start may take."""

    def __post_init__(self) -> None:
        _at_least(self, {"num_iters_cold": 1, "num_iters_warmup": 0, "num_iters_warm": 1})
        if not 0 < self.start_timeout < float("inf"):
            raise ConfigError(f"--start-timeout must be above 0, got {self.start_timeout:g}")


@dataclass(frozen=True, slots=True)
class PrefixCachingOptions:
    """Prompts with a prefix in common, asked several times. Lengths are in tokens.

    Raises:
        ConfigError: a number is out of range.
    """

    num_prompts: int = 20
    repeat_count: int = 2
    sort: bool = False
    input_length_range: str = "128:256"
    prefix_len: int = 0
    output_len: int = 10
    dataset_path: str | None = None
    disable_detokenize: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(self, {"num_prompts": 1, "repeat_count": 1, "prefix_len": 0, "output_len": 1})
        low, high = self.lengths
        if not max(1, self.prefix_len) <= low <= high:
            raise ConfigError(
                "--input-length-range must be LOW:HIGH, ascending, with LOW at least 1 and "
                f"--prefix-len {self.prefix_len}, got {self.input_length_range!r}"
            )

    @property
    def lengths(self) -> tuple[int, int]:
        """Least and most tokens of a prompt, the prefix included."""
        low, _, high = self.input_length_range.partition(":")
        return (int(low), int(high)) if low.isdecimal() and high.isdecimal() else (0, -1)


@dataclass(frozen=True, slots=True)
class LongDocumentOptions:
    """Long documents, each asked several times. Lengths are in tokens.

    Raises:
        ConfigError: a number or a mode is wrong.
    """

    num_documents: int = 8
    document_length: int = 20000
    output_len: int = 10
    repeat_count: int = 2
    repeat_mode: str = "random"
    shuffle_seed: int = 0
    disable_detokenize: bool = False

    def __post_init__(self) -> None:
        names = ("num_documents", "document_length", "output_len", "repeat_count")
        _at_least(self, {**dict.fromkeys(names, 1), "shuffle_seed": 0})
        if self.repeat_mode not in ("random", "tile", "interleave"):
            raise ConfigError(
                f"--repeat-mode must be random, tile or interleave, got {self.repeat_mode!r}"
            )
