"""Limits and policy of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from quire.bounds import check_section, flag
from quire.errors import ConfigError
from quire.registry import Registry

SERVER_LIMITS: Final = {
    "max_num_queued_reqs": 2**15,
    "max_num_queued_tokens": 2**24,
    "max_queued_bytes": 2**30,
    "max_buffered_bytes": 2**28,
}
"""What a server holds at most unless set otherwise. Ordinary loads stay far below: these limits
bound the memory of a server that is offered more than it can compute, or whose clients do not
read."""
PREEMPTION_MODES = ("auto", "recompute", "swap")
POLICIES: Final[Registry[type[Any]]] = Registry(
    "scheduling policy",
    {
        "fcfs": "quire.core.policies:FCFS",
        "priority": "quire.core.policies:Priority",
        "sjf": "quire.core.policies:ShortestJobFirst",
        "ljf": "quire.core.policies:LongestJobFirst",
        "fair": "quire.core.policies:Fair",
        "prefill_first": "quire.core.policies:PrefillFirst",
    },
    plugins="policy",
    subclass_of="quire.core.policies:Policy",
)
"""The values of `scheduling_policy`, and the class of each."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How much one step may compute, and which request goes first."""

    max_num_batched_tokens: int = 2048
    """Largest number of tokens computed in one step, prompt chunks and decodes together. A smaller
    budget makes inter-token latency smoother, a larger one raises throughput."""
    max_num_seqs: int = 128
    """Largest number of requests running at once."""
    scheduling_policy: str = "fcfs"
    """Which request goes first: `fcfs` (in order of arrival), `priority` (lower `priority` first,
    ties by arrival), `sjf` and `ljf` (fewest or most uncached prompt tokens first), `fair` (clients
    take turns), `prefill_first` (waiting prompts before running requests), or the name of a
    plugin's."""
    priority_preemption: bool = False
    """With `priority`: a waiting request may take the place of a strictly less urgent running one
    when there is no room."""
    scheduler_aging_seconds: float | None = None
    """With `sjf`, `ljf` and `priority`: requests that have waited this long go first, oldest first;
    0 turns this off. Default: 30 with `sjf` and `ljf`, 0 with `priority`."""
    enable_chunked_prefill: bool = True
    """Split a prompt that does not fit the rest of a step's token budget."""
    long_prefill_token_threshold: int = 0
    """Largest number of prompt tokens that one request may compute in a step it shares with others;
    0: no such limit."""
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
    """Admit a request only when blocks for its whole prompt are free, not just for its first chunk;
    this makes preemptions rarer."""
    preemption_mode: str = "auto"
    """What happens to the KV of a preempted request if there is a second tier (`--swap-space`):
    `swap` copies it there, `recompute` drops it, `auto` does whichever is cheaper by measured
    costs."""
    max_num_queued_reqs: int | None = None
    """Largest number of requests that may wait in a server; further ones are refused with status
    429. -1: no limit. Default: 32768."""
    max_num_queued_tokens: int | None = None
    """Largest number of prompt tokens that may wait or be in prefill in a server; a request that
    would exceed it is refused with status 429, unless no other request is ahead of it. -1: no
    limit. Default: 16777216."""
    max_queued_bytes: int | None = None
    """Largest memory, in bytes, that waiting requests and those in prefill may take in a server:
    prompts and the lists among their parameters, estimated; a request that would exceed it is
    refused with status 429, unless no other request is ahead of it. -1: no limit. Default:
    1 GiB."""
    max_buffered_bytes: int | None = None
    """Largest memory, in bytes, that outputs may take in a server that slow clients have not read
    yet, all streams together and by estimate. Above it, the stream that holds most is ended with an
    error. -1: no limit. Default: 256 MiB."""
    stream_interval: int = 1
    """Tokens per output of a stream, for clients that cannot use every token at once: the first
    token and the end are sent at once. A request may ask for more with `stream_interval`."""
    watermark: float = 0.0
    """Share of KV blocks, 0 to 1, kept free when a request is admitted while others run; this makes
    preemptions rarer."""

    def server_limit(self, name: str) -> int | None:
        """A row of `SERVER_LIMITS`, as it holds in a server; `None`: no limit."""
        given: int | None = getattr(self, name)
        limit = SERVER_LIMITS[name] if given is None else given
        return None if limit < 0 else limit

    def __post_init__(self) -> None:
        check_section(self)
        if self.scheduling_policy not in POLICIES:
            raise ConfigError(
                f"--scheduling-policy must be one of {', '.join(POLICIES.names())}, "
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
