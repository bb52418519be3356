"""Which loads are worth a point on a curve: the least, the most, and some between them.

The least is one request at a time, the most is all at once. Between them, values are spread evenly
over what these two reached, so the curve is dense where the server works.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from quire.bench.sweep.rows import Row, number
from quire.errors import ConfigError

VARS: Final = ("request_rate", "max_concurrency")


def extremes(var: str, num: int) -> list[dict[str, Any]]:
    """Parameters of the least and of the most load.

    Raises:
        ConfigError: an unknown variable, or fewer than 2 values.
    """
    if var not in VARS:
        raise ConfigError(f"--workload-var must be one of {', '.join(VARS)}, got {var!r}")
    if num < 2:
        raise ConfigError(f"--workload-iters must be at least 2, got {num}")
    one_by_one = {"max_concurrency": 1, "request_rate": "inf"}
    return [one_by_one, {"request_rate": "inf"}]


def between(rows: Sequence[Row], var: str, num: int) -> list[float | int]:
    """`num - 2` values between what the least and the most load reached.

    Raises:
        ConfigError: there is no result of both.
    """
    figure = "request_throughput" if var == "request_rate" else "max_concurrent_requests"
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(str(row["point"]), []).append(number(row, figure))
    if len(found) != 2:
        raise ConfigError(f"there are results of {len(found)} of the two extreme loads")
    low, high = sorted(statistics.median(values) for values in found.values())
    step = (high - low) / max(1, num - 1)
    values: list[float | int] = [round(low + i * step, 3) for i in range(1, num - 1)]
    if var == "max_concurrency":
        values = sorted({round(value) for value in values} - {round(low), round(high)})
    return values
