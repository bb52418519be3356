"""Facts about steps and requests, not formatted: log line, metrics, traces and tests read the same
numbers."""

from __future__ import annotations

from typing import Final

import msgspec

from quire.core.batch import LayerSpan


class MachineStats(msgspec.Struct, array_like=True):
    """What the machine did in the `seconds` before `time`. None: not known."""

    time: float
    """Seconds on the core's clock."""
    seconds: float
    load: float | None
    """Threads of all processes that ran or were ready to, averaged over the last minute."""
    cores: int
    """Processor cores that this process may use."""
    stolen_seconds: float | None
    """Processor time that the hypervisor gave to others, all cores together."""
    throttled_seconds: float | None
    """Time during which the control group's CPU quota was used up."""


class StepStats(msgspec.Struct, array_like=True):
    """One engine step: vLLM's `SchedulerStats`, and what the step did."""

    step: int = 0
    start: float = 0.0
    """Seconds on the core's clock when the step began."""
    num_running: int = 0
    """Requests in `running` after the step."""
    num_waiting: int = 0
    """Those that wait for their grammar included."""
    num_compiling: int = 0
    """Those that wait for their grammar."""
    num_swapped: int = 0
    """Waiting requests whose KV is in the second tier."""
    swap_usage: float = 0.0
    """Share of the second tier that such requests hold, 0 to 1."""
    kv_cache_usage: float = 0.0
    """0 to 1; cached blocks nobody holds count as free."""
    num_prompt_tokens: int = 0
    """Prompt tokens computed in this step (cache hits excluded)."""
    num_generation_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_scheduled_requests: int = 0
    num_prefills: int = 0
    """Requests that computed prompt tokens in this step."""
    num_preempted: int = 0
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache by requests admitted in this step."""
    prefix_hits: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that the model confirmed."""
    num_accepted_per_pos: list[int] = []
    """Requests by how far their draft was confirmed: entry `k` counts those with more than `k`
    accepted tokens, as long as the longest draft of the step."""
    num_drafts: int = 0
    """Requests with draft tokens in this step."""
    num_blocks_allocated: int = 0
    num_blocks_freed: int = 0
    num_blocks_evicted: int = 0
    """Cached blocks whose content was given up for new tokens."""
    num_blocks_swapped_out: int = 0
    """Copied to the second tier, for preempted requests or because their place was needed."""
    num_blocks_swapped_in: int = 0
    num_swap_failures: int = 0
    """Blocks that could not be written there or read back."""
    step_seconds: float = 0.0
    schedule_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    update_seconds: float = 0.0
    facts: bytes = b""
    """The records of `quire.core.facts` up to and including this step."""
    names: list[tuple[int, str]] = []
    """Number and internal id of each request first named in them."""
    swap_seconds: float = 0.0
    worker_start: float = 0.0
    """When the worker began, on the monotonic clock. This and `worker_seconds` are measured only
    for detailed traces."""
    worker_seconds: float = 0.0
    layer_times: list[LayerSpan] = []
    """The layers in order, for detailed traces; otherwise empty."""
    prefix_lookups: list[tuple[int, int]] = []
    """(`prefix_queries`, `prefix_hits`) of each request."""
    stays: list[tuple[float, float, list[float]]] = []
    """For each sampled block whose cached content was evicted in this step, in seconds: how long
    ago it was put there, how long ago it was last used, and the gaps between its uses."""
    prefix_missed: int = 0
    """Tokens of `prefix_queries` that had been cached, but were evicted before this lookup."""
    cpu_wait_seconds: float | None = None
    """The part of `step_seconds` by which the step is late because its threads were ready to run
    and got no core. None: not measured."""
    gap_wait_seconds: float | None = None
    """The same for the pause before the step, if there was one."""
    unread_wait_seconds: float | None = None
    """The same for the steps and pauses since the reading before this one."""
    api_wait_seconds: float | None = None
    """The same for the event loop of the API process since the step before. The API process fills
    this in."""
    machine: MachineStats | None = None
    """Read about once a second."""
    num_attended_tokens: int = 0
    """`ScheduledBatch.num_attended_tokens`."""
    num_integrity_failures: int = 0
    """Times since the step before that the scheduler's books were found wrong, and made anew."""
    num_shed_blocks: int = 0
    """KV blocks whose cached content was given up since the step before because the machine's
    memory ran short."""


class FinishedRequestStats(msgspec.Struct, array_like=True):
    """One completion that ended, for histograms. Times in seconds.

    queue = first scheduled - queued, prefill = first token - scheduled, decode = last token -
    first token, inference = last token - scheduled, e2e = finish seen by the frontend - arrival.
    """

    finish_reason: str
    e2e_time: float
    queue_time: float
    prefill_time: float
    decode_time: float
    inference_time: float
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    n: int
    max_tokens: int | None
    request_id: str = ""
    """The id that the engine core knows it by."""
    corrupted: bool = False
    """Whether it ended because the model's output was not a finite number."""
    longest: int | None = None
    """Set on the last completion of a request to end: the tokens of its longest completion."""
    finished_ts: float = 0.0
    """Seconds on the frontend's clock."""
    first_token_ts: float = 0.0
    """On the same clock; 0 if there was no token."""


RECOVERY_PARTS: Final = (
    "process", "imports", "promotion", "config", "verify", "weights", "kv_cache", "prefill",
)  # fmt: skip
"""Parts of the replacement of a core, in their order; most have only some of them. `process`: from
the call that starts it to the first line of Python. `promotion`: until a process that was waiting
gets the word. `config`: reading the model's configuration, choosing device and kernels. `weights`:
building the model, and reading or mapping its weights. `prefill`: from readiness until every
request that had output has more."""


class IterationStats(msgspec.Struct, array_like=True):
    """What one batch of engine outputs meant to the callers."""

    num_prompt_tokens: int = 0
    """Tokens of the prompts whose first output arrived, cache hits included."""
    num_cached_tokens: int = 0
    promoted_tokens: dict[str, int] = {}
    """The cached tokens that came from the second tier, by its kind: `host` or `disk`."""
    num_generation_tokens: int = 0
    time_to_first_token: list[float] = []
    inter_token_latency: list[float] = []
    """Seconds; one entry per output after a request's first."""
    finished: list[FinishedRequestStats] = []
    admission_rejections: dict[str, int] = {}
    """Requests refused because of a queue limit, by the limit's name."""
    core_stalls: dict[str, int] = {}
    """Engine cores that were stuck, by how (`quire.engine.cores.watchdog.KINDS`)."""
    num_slow_readers: int = 0
    """Requests ended because their callers left too much unread."""
    core_recovery: dict[str, float] = {}
    """Of a replacement of the core that has just ended: seconds by part (`RECOVERY_PARTS`), and
    in `total`."""
