"""What callers get back: `RequestOutput` with its `CompletionOutput`s.

Names and fields are vLLM's. Nothing here knows how the values came about.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FinishReason(enum.IntEnum):
    """Why a completion ended. `str()` gives the word used in APIs and metric labels."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(slots=True)
class Logprob:
    """Log-probability of one candidate token at one position."""

    logprob: float
    rank: int | None = None
    """1 for the most likely token of the vocabulary."""
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Candidates of one position by token id; the sampled (or prompt) token comes first."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request."""

    index: int
    """0 to `n` - 1."""
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over sampled tokens, when `logprobs` was asked for."""
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`; `None` while running."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; `None` for end of sequence."""
    lora_request: object | None = None

    def finished(self) -> bool:
        """True once `finish_reason` is set."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Timings of one request, in seconds on the monotonic clock."""

    arrival_time: float
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    finished_ts: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    @property
    def first_token_latency(self) -> float:
        """Time to first token: first output seen by the caller's process minus arrival."""
        return self.first_token_ts - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """State of one request as its caller sees it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """Entry 0 is `None`: nothing precedes the first token."""
    metrics: RequestMetrics | None = None
    lora_request: object | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    seed: int | None = None
    """Seed in force: the request's own or the one chosen at admission. Repeating the request
    with it gives the same tokens."""
    error: str | None = None
    """Set when `finish_reason` is `error`: what happened to this request."""
