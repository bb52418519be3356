"""Whether a request is over: an ordered check of its last token.

Stop *strings* need text. The output processor finds them and then aborts the request.
"""

from __future__ import annotations

from quire.core.request import Request, RequestStatus


def check_stop(request: Request) -> bool:
    """Set `status` and `stop_reason` if the last output token ends the request.

    End of sequence comes first, so that it counts as "stop" even on the last allowed position;
    then stop ids; then the length limits. `min_tokens` needs no check: the sampler masks those
    ids until it is reached.
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
    return False
