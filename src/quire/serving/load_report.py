"""The load of an engine in the headers of its replies, for load balancers.

It is the Open Request Cost Aggregation of Envoy and gRPC (ORCA): a request with the header
`endpoint-load-metrics-format` is answered with the header `endpoint-load-metrics`. Names and
numbers are vLLM's. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from quire.core.stats import StepStats

ASKED: Final = b"endpoint-load-metrics-format"
TOLD: Final = b"endpoint-load-metrics"


def _text(metrics: dict[str, float]) -> bytes:
    pairs = [f"named_metrics.{name}={value}" for name, value in metrics.items()]
    return f"TEXT {', '.join(pairs)}".encode()


def _json(metrics: dict[str, float]) -> bytes:
    return b"JSON " + msgspec.json.encode({"named_metrics": metrics})


FORMATS: Final[dict[bytes, Callable[[dict[str, float]], bytes]]] = {b"text": _text, b"json": _json}
"""By name. ORCA's binary format is not among them, as in vLLM."""


def load_report(asked: bytes | None, step: StepStats | None) -> bytes | None:
    """The value of the header.

    Args:
        asked: The value of the request's header; any but the name of a format asks for nothing.
        step: The latest step; `None` before the first.
    """
    write = None if asked is None else FORMATS.get(asked.strip().lower())
    if write is None:
        return None
    now = step or StepStats()
    return write(
        {
            "kv_cache_usage_perc": now.kv_cache_usage,
            "num_requests_waiting": float(now.num_waiting),
        }
    )
