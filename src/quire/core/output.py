"""What a step tells the front end about each request. It is handed over as it is within a process,
and as msgpack between processes."""

from __future__ import annotations

import msgspec

from quire.core.batch import TokenLogprobs
from quire.core.request import Request
from quire.outputs import FinishReason, Pooled


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one request, or its end."""

    # A step with thousands of requests makes thousands of these. The collector need not look
    # through them: nothing they hold leads back to them.

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
    pooled: Pooled | None = None
    num_promoted_tokens: int = 0
    """Of the cached ones, those that came from the second tier."""
    prompt_logprobs_start: int | None = None
    """Where `new_prompt_logprobs` is a piece of a list too large for one message: its place in it.
    The pieces come in order and end with the prompt."""
    scored: Pooled | None = None
    """Log-probabilities of `prompt_logprob_token_ids`, with the first token."""


def output_of(
    request: Request,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: list[TokenLogprobs | None] | None = None,
    pooled: Pooled | None = None,
    scored: Pooled | None = None,
) -> EngineCoreOutput:
    """New tokens of a request with everything that is known about it. Used for its first output
    and its last; the ones between carry their tokens alone."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=token_ids,
        new_logprobs=logprobs,
        new_prompt_logprobs=prompt_logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        num_cached_tokens=max(0, request.num_cached_tokens),
        queued_ts=request.queued_ts,
        scheduled_ts=request.scheduled_ts,
        num_preemptions=request.num_preemptions,
        error=request.error,
        pooled=pooled,
        num_promoted_tokens=request.num_promoted_tokens,
        scored=scored,
    )


def failed_output(request_id: str, reason: str) -> EngineCoreOutput:
    """The end of a request that could not be computed or told of."""
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=reason)
