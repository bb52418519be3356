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
