"""The timings of one request, as replies tell them with `--enable-per-request-metrics`.

Names and meanings are vLLM's: the time to the first token counts from when the request was
scheduled, and the time in the queue is told apart. Knows no reply.
"""

from __future__ import annotations

from quire.outputs import RequestMetrics


def request_metrics(times: RequestMetrics | None) -> dict[str, float | None]:
    """Milliseconds, and tokens per second from the scheduling to the last token. What was not
    measured is `None`: a request that a restarted server goes on with has no times of its begin."""
    queued = scheduled = first = last = 0.0
    tokens = 0
    if times is not None:
        queued, scheduled = times.queued_ts, times.scheduled_ts
        first, last = times.first_token_ts, times.last_token_ts
        tokens = times.num_generation_tokens
    decoding = _between(first, last)
    computing = _between(scheduled, last)
    return {
        "time_to_first_token_ms": _between(scheduled, first),
        "generation_time_ms": decoding,
        "queue_time_ms": _between(queued, scheduled),
        "mean_itl_ms": None if decoding is None or tokens < 2 else decoding / (tokens - 1),
        "tokens_per_second": 1000 * tokens / computing if computing else None,
    }


def _between(start: float, end: float) -> float | None:
    """Milliseconds between two times, of which 0 stands for one that was not taken."""
    return 1000 * max(0.0, end - start) if start and end else None
