"""Limits and policy of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from quire.bounds import check_section, flag
from quire.errors import ConfigError

PREEMPTION_MODES = ("auto", "recompute", "swap")
POLICIES = ("fcfs", "priority", "sjf", "ljf", "fair", "prefill_first")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold, and who goes first."""

    max_num_batched_tokens: int = 2048
    """Most tokens computed in one step, prompt chunks and decodes together. Smaller gives
    smoother inter-token latency, larger gives more throughput."""
    max_num_seqs: int = 128
    """Most requests running at once."""
    scheduling_policy: str = "fcfs"
    """Who goes first: `fcfs`, `priority` (lower `priority` first, ties by arrival), `sjf` and `ljf`
    (fewest or most uncached prompt tokens first), `fair` (turns by client), `prefill_first`
    (waiting prompts before running requests)."""
    priority_preemption: bool = False
    """With `priority`: a waiting request may take the place of a strictly less urgent running one
    when there is no room."""
    scheduler_aging_seconds: float | None = None
    """With `sjf`, `ljf` and `priority`: who has waited this long goes first, oldest first; 0 turns
    it off. Default: 30 with `sjf` and `ljf`, 0 with `priority`."""
    enable_chunked_prefill: bool = True
    """Split a prompt that does not fit the rest of a step's token budget."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one request in one step when others are there too; 0: no such
    limit."""
    long_prefill_token_threshold_adaptive: bool = False
    """Raise that limit to an equal share of the budget: `--max-num-batched-tokens` divided by the
    number of requests, waiting ones included."""
    scheduler_cls: str | None = None
    """A scheduling policy of your own, as `module:Class`; takes the place of
    `--scheduling-policy`."""
    scheduler_delay_factor: float = 0.0
    """Hold prompts back until the oldest has waited this many times the duration of the last step
    with a prompt, so that prompts come in together; 0: admit them at once."""
    scheduler_reserve_full_isl: bool = True
    """Admit a request only when blocks for its whole prompt are free, not only for its first
    chunk: fewer preemptions."""
    preemption_mode: str = "auto"
    """What becomes of the KV of a preempted request, if there is a second tier (`--swap-space`):
    `swap` copies it there, `recompute` drops it, `auto` does what is cheaper by measured costs."""
    max_num_queued_reqs: int | None = None
    """Most requests that may wait in a server: one more is refused with status 429. Default: no
    limit."""
    max_num_queued_tokens: int | None = None
    """Most prompt tokens that may wait or be in prefill in a server: a request that would add more
    is refused with status 429, unless nothing is ahead of it. Default: no limit."""
    watermark: float = 0.0
    """Share of KV blocks, 0 to 1, kept free when a request is admitted while others run: fewer
    preemptions."""

    def __post_init__(self) -> None:
        check_section(self)
        if self.scheduling_policy not in POLICIES:
            raise ConfigError(
                f"--scheduling-policy must be one of {', '.join(POLICIES)}, "
                f"got {self.scheduling_policy!r}"
            )
        self._check(
            "preemption_mode",
            "one of " + ", ".join(PREEMPTION_MODES),
            self.preemption_mode in PREEMPTION_MODES,
        )
        path = self.scheduler_cls
        if path is not None:
            parts = path.split(":")
            self._check("scheduler_cls", "module:Class", len(parts) == 2 and all(parts))

    def _check(self, name: str, rule: str, holds: bool) -> None:
        if not holds:
            raise ConfigError(f"{flag(name)} must be {rule}, got {getattr(self, name)!r}")
