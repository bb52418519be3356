"""Facts about steps, without formatting: log line, metrics and tests read the same numbers."""

from __future__ import annotations

import msgspec


class StepStats(msgspec.Struct, array_like=True):
    """One engine step. The documents' `SchedulerStats` plus what the step did."""

    step: int = 0
    num_running: int = 0
    """Requests in `running` after the step."""
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """0 to 1; cached blocks nobody holds count as free."""
    num_prompt_tokens: int = 0
    """Prompt tokens computed in this step (cache hits excluded)."""
    num_generation_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_preempted: int = 0
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache by requests admitted in this step."""
    prefix_hits: int = 0
    step_seconds: float = 0.0
    forward_seconds: float = 0.0


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


class IterationStats(msgspec.Struct, array_like=True):
    """What one batch of engine outputs meant to the callers."""

    num_prompt_tokens: int = 0
    """Whole prompts whose prefill result arrived, cache hits included."""
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_token: list[float] = []
    inter_token_latency: list[float] = []
    """One entry per output event after the first."""
    finished: list[FinishedRequestStats] = []
    admission_rejections: dict[str, int] = {}
    """Requests refused because of a queue limit, by the limit's name."""
