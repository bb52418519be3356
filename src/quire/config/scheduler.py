"""Limits and policy of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold, and who goes first."""

    max_num_batched_tokens: int = 2048
    """Most tokens computed in one step, prompt chunks and decodes together. Smaller gives
    smoother inter-token latency, larger gives more throughput."""
    max_num_seqs: int = 128
    """Most requests running at once."""
    scheduling_policy: str = "fcfs"
    """Order of waiting requests: `fcfs`, or `priority` (lower `priority` first, ties by
    arrival)."""
    enable_chunked_prefill: bool = True
    """Split a prompt that does not fit the rest of a step's token budget."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one request in one step when others are there too; 0: no such
    limit."""

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} must be at least 1, got {getattr(self, name)}")
        if self.scheduling_policy not in POLICIES:
            raise ConfigError(
                f"--scheduling-policy must be one of {', '.join(POLICIES)}, "
                f"got {self.scheduling_policy!r}"
            )
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                "--long-prefill-token-threshold must be at least 0, "
                f"got {self.long_prefill_token_threshold}"
            )
