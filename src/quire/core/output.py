"""What a step tells the outside about each request. Travels inline or over the wire as it is."""

from __future__ import annotations

import msgspec

from quire.core.batch import TokenLogprobs
from quire.outputs import FinishReason


class EngineCoreOutput(msgspec.Struct, array_like=True):
    """New tokens of one request, or its end."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    new_prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    num_preemptions: int = 0
    error: str | None = None
