"""Whether a request is over: an ordered check after each token.

Stop *strings* need text. The output processor finds them and then aborts the request.
"""

from __future__ import annotations

from typing import Final

from quire.core.request import Request, RequestStatus

REPEATED: Final = "repetition_detected"
"""The stop reason of an output that repeats itself; vLLM's word."""


def check_stop(request: Request) -> bool:
    """Set `status` and `stop_reason` if the last output token ends the request.

    End of sequence comes first, so that it counts as "stop" even on the last allowed position;
    then stop ids; then the length limits; then repetitions. `min_tokens` needs no check for ids,
    which the sampler masks until it is reached.
    """
    params = request.sampling_params
    last = request.all_token_ids[-1]
    if not params.ignore_eos and last in params.eos_token_ids:
        request.status = RequestStatus.FINISHED_STOPPED
        return True
    if last in params.stop_token_ids:
        request.status = RequestStatus.FINISHED_STOPPED
        request.stop_reason = last
        return True
    if request.num_tokens >= request.length_limit:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    watch = request.repetitions
    if (
        watch is not None
        and request.num_output_tokens >= params.min_tokens
        and watch.is_repeating(request.all_token_ids)
    ):
        request.status = RequestStatus.FINISHED_REPETITION
        request.stop_reason = REPEATED
        return True
    return False
