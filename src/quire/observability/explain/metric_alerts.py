"""The on-call figures from metrics alone, and whether they exceed the usual alert limits.

This works with every server that has vLLM's metrics: it needs two scrapes of `/metrics` and no
records. The rules are the rows of `ALERT_RULES`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from quire.observability.explain.wording import seconds

Figures = dict[str, Any]
"""Figures by name; seconds, shares from 0 to 1, counts and rates per second."""

_SAMPLE: Final = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")


def parse_metrics(text: str) -> dict[str, dict[str, float]]:
    """Values of a Prometheus text, by metric and by labels as written in the text."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is not None:
            found[match["name"]][match["labels"] or ""] = float(match["value"])
    return found


Samples = Mapping[str, Mapping[str, float]]


def metric_figures(before: Samples, after: Samples, seconds: float) -> Figures:
    """The on-call figures from two scrapes.

    Rates and quantiles cover the time between the scrapes. A quantile with no observation in that
    time covers the time since the start instead; `old` lists these.
    """
    figures: Figures = {"old": []}
    for name, metric in _GAUGES.items():
        if metric in after:
            figures[name] = sum(after[metric].values())
    for name, metric in _COUNTERS.items():
        if metric in after:
            change = sum(after[metric].values()) - sum(before.get(metric, {}).values())
            figures[name] = change / seconds if seconds > 0 else 0.0
    for name, metric in _HISTOGRAMS.items():
        counts, old = _buckets(after, metric), _buckets(before, metric)
        fresh = {bound: count - old.get(bound, 0) for bound, count in counts.items()}
        if any(fresh.values()):
            counts = fresh
        else:
            figures["old"].append(name)
        for q in (50, 95, 99):
            value = _bucket_quantile(counts, q / 100)
            if value is not None:
                figures[f"{name}_p{q}"] = value
    for name, reason in (("aborted", '"abort"'), ("failed", '"error"')):
        ended = _ended(after, reason)
        figures |= {f"{name}_total": ended, f"{name}_now": ended - _ended(before, reason)}
    if _REFUSED in after:
        refused, earlier = (sum(s.get(_REFUSED, {}).values()) for s in (after, before))
        figures |= {"refused_total": refused, "refused_now": refused - earlier}
    return figures


def _ended(samples: Samples, reason: str) -> float:
    """Number of requests that ended for a reason."""
    return sum(v for k, v in samples.get("vllm:request_success_total", {}).items() if reason in k)


_REFUSED: Final = "vllm:admission_rejections_total"
_GAUGES: Final = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
}
_COUNTERS: Final = {
    "preemptions_per_second": "vllm:num_preemptions_total",
    "prompt_tokens_per_second": "vllm:prompt_tokens_total",
    "generation_tokens_per_second": "vllm:generation_tokens_total",
}
_HISTOGRAMS: Final = {
    "ttft_metric": "vllm:time_to_first_token_seconds",
    "itl_metric": "vllm:inter_token_latency_seconds",
    "e2e_metric": "vllm:e2e_request_latency_seconds",
}


def _buckets(samples: Samples, metric: str) -> dict[float, int]:
    """Cumulative counts by upper bound, summed over labels."""
    counts: dict[float, int] = defaultdict(int)
    for labels, value in samples.get(f"{metric}_bucket", {}).items():
        bound = re.search(r'le="([^"]+)"', labels)
        if bound is not None:
            counts[float(bound[1])] += int(value)
    return counts


def _bucket_quantile(counts: Mapping[float, int], q: float) -> float | None:
    """Quantile by linear interpolation within a bucket, like PromQL's `histogram_quantile`."""
    bounds = sorted(counts)
    total = counts[bounds[-1]] if bounds else 0
    if not total:
        return None
    low, below = 0.0, 0
    for bound in bounds:
        if counts[bound] >= q * total:
            if math.isinf(bound):
                return low
            inside = counts[bound] - below
            return low + (bound - low) * ((q * total - below) / inside if inside else 1.0)
        low, below = bound, counts[bound]
    return low


@dataclass(frozen=True, slots=True)
class AlertRule:
    """A figure that whoever is on call looks at first, and its limit."""

    name: str
    limit: float
    text: Callable[[float], str]
    meaning: str


ALERT_RULES: Final = (
    AlertRule("ttft_metric_p95", 0.5, lambda v: f"p95 TTFT {seconds(v)}", "first tokens are late"),
    AlertRule("waiting", 10, lambda v: f"{v:.0f} waiting", "the queue grows: not enough capacity"),
    AlertRule(
        "kv_usage", 0.9, lambda v: f"KV cache usage {100 * v:.0f} %", "the KV cache is nearly full"
    ),
    AlertRule(
        "preemptions_per_second",
        0.5,
        lambda v: f"{v:.1f} preemptions/s",
        "requests lose their blocks and are computed again",
    ),
    AlertRule("failed_now", 0, lambda v: f"{v:.0f} requests failed", "see the log"),
    AlertRule(
        "refused_now",
        0,
        lambda v: f"{v:.0f} requests refused",
        "the queue is full, or deadlines cannot be kept: not enough capacity",
    ),
)
"""The rules, with the limits that alert rules for vLLM usually have."""


def check_alerts(figures: Figures) -> list[tuple[str, bool, str]]:
    """For each rule whose figure is known: the figure as text, whether it exceeds its limit, and
    what that means.

    A figure that covers the time since the start never counts as exceeding its limit, because what
    it shows may be long over.
    """
    return [
        _read(gate, value, figures)
        for gate in ALERT_RULES
        if (value := figures.get(gate.name)) is not None
    ]


def _read(gate: AlertRule, value: float, figures: Figures) -> tuple[str, bool, str]:
    text = gate.text(value)
    if gate.name.rsplit("_p", 1)[0] in figures.get("old", ()):
        return f"{text} since the start, none just now", False, gate.meaning
    total = figures.get(gate.name.replace("_now", "_total"), 0)
    if gate.name.endswith("_now") and total:
        text = f"{text} just now, {total:.0f} since the start"
    return text, value > gate.limit, gate.meaning
