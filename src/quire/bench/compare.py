"""Two runs, or two groups of repeated runs, compared: differences with 95 % confidence intervals.

With one run on each side, the interval of a latency comes from a bootstrap over the run's requests,
in blocks of neighbours, because requests that run together are slow together (circular block
bootstrap, Politis and Romano 1992). It tells what chance among requests can do, not what
differs from one start of a server to the next. With at least three runs on each side, intervals
come from the runs' own figures (Welch's t on their logarithms), for throughput too, and tell that
as well.

Knows results and records, and no server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quire.bench.result import LATENCIES, MS, RequestRecord, records_of
from quire.errors import ConfigError

REPLICATES: Final = 500
"""Of a bootstrap: its spread is then known to 3 %."""
MOST_AT_ONCE: Final = 2_000_000
"""Samples of the replicates that are made at a time."""
MOST_WORK: Final = 100_000_000
"""Samples that all replicates of one metric may look at; very long runs get fewer replicates."""
BLOCKS: Final = 12
"""Blocks that a run is cut into: long enough that one knows little of the next."""
LEAST_REPETITIONS: Final = 3
LEAST_REQUESTS: Final = 100
BEYOND: Final = 10
"""Samples that must lie beyond a percentile for an interval of it: p99 needs a thousand."""
NO_RATIO: Final = "needs figures above 0"
MAYBE_NO_RATIO: Final = "may be 0 by chance, so there is no ratio"
STATISTICS: Final = ("mean", "median", "p99")
THROUGHPUTS: Final = {
    "request_throughput": "Request throughput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_token_throughput": "Total token throughput (tok/s)",
}
_T975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantiles of Student's t for 1 to 30 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of both sides. `change` and its interval are ratios minus 1: 0.05 is 5 % more.
    `change` is NaN if the first side's figure is not above 0."""

    name: str
    before: float
    after: float
    change: float
    low: float | None
    high: float | None
    """None: nothing can be said from what there is; `note` says why."""
    higher_is_better: bool
    note: str = ""

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `same` (the interval holds 0), or `unknown`."""
        if self.low is None or self.high is None:
            return "unknown"
        if self.low <= 0 <= self.high:
            return "same"
        return "better" if (self.low > 0) == self.higher_is_better else "worse"


Group = Sequence[Mapping[str, Any]]


def compare(before: Group, after: Group, seed: int = 0) -> list[Difference]:
    """All figures that both sides have.

    Args:
        before: Results of one side: one detailed result, or repetitions of the same run.
        after: Results of the other.
        seed: Of the bootstrap.

    Raises:
        ConfigError: a side has no answered request, or there are neither details nor repetitions.
    """
    for side, group in (("first", before), ("second", after)):
        if any(not result.get("completed") for result in group):
            raise ConfigError(f"the {side} side has a run in which no request was answered")
    if min(len(before), len(after)) >= LEAST_REPETITIONS:
        return _of_repetitions(before, after)
    if max(len(before), len(after)) > 1:
        raise ConfigError(
            f"repetitions need at least {LEAST_REPETITIONS} results on each side, got "
            f"{len(before)} and {len(after)}: append more, or give one detailed result each"
        )
    return _of_requests(before[0], after[0], np.random.default_rng(seed))


# ---- repetitions ---------------------------------------------------------------------------------


def _of_repetitions(before: Group, after: Group) -> list[Difference]:
    names = {f"{s}_{m}_ms": False for m in LATENCIES for s in STATISTICS}
    names |= dict.fromkeys(THROUGHPUTS, True)
    found = []
    for name, higher in names.items():
        if all(_figure(result, name) > 0 for result in (*before, *after)):
            sides = [np.log([_figure(r, name) for r in group]) for group in (before, after)]
            found.append(_welch(_title(name), sides[0], sides[1], higher))
    return found


def _figure(result: Mapping[str, Any], name: str) -> float:
    """One of a result; 0 if it has none."""
    value = result.get(name) or 0
    if not isinstance(value, int | float):
        raise ConfigError(f"the result's {name} must be a number, got {value!r:.60}")
    return float(value)


def _welch(name: str, one: NDArray[Any], two: NDArray[Any], higher: bool) -> Difference:
    parts = [np.var(side, ddof=1) / len(side) for side in (one, two)]
    error = math.sqrt(sum(parts))
    freedom = len(one) + len(two) - 2.0
    if error > 0:
        sizes = (len(one), len(two))
        freedom = sum(parts) ** 2 / sum(
            part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True)
        )
    middle, margin = float(two.mean() - one.mean()), _t975(freedom) * error
    low, high = (math.expm1(middle + sign * margin) for sign in (-1, 1))
    before, after = (float(np.exp(side.mean())) for side in (one, two))
    return Difference(name, before, after, math.expm1(middle), low, high, higher)


def _t975(freedom: float) -> float:
    """Rounded down to whole degrees, which errs on the wide side."""
    whole = max(1, int(freedom))
    return _T975[whole - 1] if whole <= len(_T975) else 1.96 + 2.5 / whole


# ---- requests of one run -------------------------------------------------------------------------


def _of_requests(
    before: Mapping[str, Any], after: Mapping[str, Any], rng: np.random.Generator
) -> list[Difference]:
    sides = [_in_order(result) for result in (before, after)]
    found = []
    for metric in LATENCIES:
        one, two = (_Samples(side, metric) for side in sides)
        if len(one.values) and len(two.values):
            found += _differences(metric, one, two, rng)
    for name in THROUGHPUTS:
        a, b = _figure(before, name), _figure(after, name)
        if a > 0 and b > 0:
            note = f"needs {LEAST_REPETITIONS} runs on each side (--append-result)"
            found.append(Difference(_title(name), a, b, b / a - 1, None, None, True, note))
    return found


def _in_order(result: Mapping[str, Any]) -> list[RequestRecord]:
    done = [record for record in records_of(result) if record.ok]
    return sorted(done, key=lambda record: record.start)


class _Samples:
    """A metric's samples, sorted, each with the request that it belongs to."""

    def __init__(self, records: Sequence[RequestRecord], metric: str) -> None:
        values, owners = [], []
        for i, record in enumerate(records):
            own = _own_samples(record, metric)
            values += own
            owners += [i] * len(own)
        order = np.argsort(values, kind="stable")
        self.values = np.asarray(values, dtype=np.float64)[order]
        self.owners = np.asarray(owners, dtype=np.int64)[order]
        self.num_requests = len(records)

    def exactly(self, statistic: str) -> float:
        """The figure of the run itself."""
        if statistic == "mean":
            return float(self.values.mean())
        return float(np.percentile(self.values, _PERCENT[statistic]))

    def resampled(self, num: int, rng: np.random.Generator) -> dict[str, NDArray[np.float64]]:
        """Each statistic in `num` replicates."""
        found = {name: np.empty(num) for name in STATISTICS}
        at_once = max(1, MOST_AT_ONCE // len(self.values))
        for start in range(0, num, at_once):
            part = slice(start, min(num, start + at_once))
            weights = _weights(part.stop - part.start, self.num_requests, rng)[:, self.owners]
            total = np.cumsum(weights, axis=1)
            whole = np.maximum(total[:, -1], 1)
            found["mean"][part] = weights @ self.values / whole
            for name, percent in _PERCENT.items():
                # The first sample at which the share is reached.
                place = (total < (percent / 100 * whole)[:, None]).sum(axis=1)
                found[name][part] = self.values[np.minimum(place, len(self.values) - 1)]
        return found


def _weights(num: int, num_requests: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """How often each request is in each replicate: `[num, num_requests]`."""
    block = -(-num_requests // BLOCKS)
    starts = rng.integers(0, num_requests, (num, -(-num_requests // block)))
    chosen = (starts[:, :, None] + np.arange(block)) % num_requests
    chosen = chosen.reshape(num, -1)[:, :num_requests]
    weights = np.zeros((num, num_requests), dtype=np.int64)
    np.add.at(weights, (np.arange(num)[:, None], chosen), 1)
    return weights


_PERCENT: Final = {"median": 50.0, "p99": 99.0}


def _own_samples(record: RequestRecord, metric: str) -> list[float]:
    if metric == "itl":
        return record.itls
    if metric == "ttft":
        return [record.ttft] if record.first_token is not None else []
    value = record.tpot if metric == "tpot" else record.latency
    return [] if value is None else [value]


def _differences(
    metric: str, one: _Samples, two: _Samples, rng: np.random.Generator
) -> list[Difference]:
    work = max(len(one.values), len(two.values))
    num = min(REPLICATES, max(200, MOST_WORK // work))
    few = min(one.num_requests, two.num_requests) < LEAST_REQUESTS
    drawn = ({}, {}) if few else (one.resampled(num, rng), two.resampled(num, rng))
    found = []
    for statistic in STATISTICS:
        name = _title(f"{statistic}_{metric}_ms")
        before, after = one.exactly(statistic), two.exactly(statistic)
        change = after / before - 1 if before > 0 else math.nan
        low: float | None = None
        high: float | None = None
        if min(before, after) <= 0:
            note = NO_RATIO
        elif few:
            note = f"needs {LEAST_REQUESTS} requests on each side"
        else:
            note = _too_few(statistic, min(len(one.values), len(two.values)))
        if not note and min(side[statistic].min() for side in drawn) <= 0:
            # Outputs that came in one piece have no gap; where half of them did, a median may be 0.
            note = MAYBE_NO_RATIO
        if not note:
            low, high = _interval(change, drawn[0][statistic], drawn[1][statistic])
        found.append(Difference(name, before * MS, after * MS, change, low, high, False, note))
    return found


def _interval(
    change: float, before: NDArray[np.float64], after: NDArray[np.float64]
) -> tuple[float, float]:
    """Around the ratio of the runs: their spread between replicates, with Student's t for so few
    blocks. Percentiles of the replicates would be too narrow: they hold 0 in 88 % of A/A tests of
    200 requests that depend on their neighbours."""
    ratios = np.log(after / before)
    spread = float(ratios.std()) * math.sqrt(BLOCKS / (BLOCKS - 1))
    middle, margin = math.log1p(change), _t975(BLOCKS - 1) * spread
    return math.expm1(middle - margin), math.expm1(middle + margin)


def _too_few(statistic: str, num_samples: int) -> str:
    percent = _PERCENT.get(statistic)
    if percent is None or num_samples * (1 - percent / 100) >= BEYOND:
        return ""
    return f"needs {round(BEYOND / (1 - percent / 100))} samples, got {num_samples}"


def _title(key: str) -> str:
    if key in THROUGHPUTS:
        return THROUGHPUTS[key]
    statistic, metric, _ = key.split("_")
    return f"{statistic.capitalize()} {LATENCIES[metric][1]} (ms)"
