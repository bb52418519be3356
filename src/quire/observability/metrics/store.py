"""The values of the metrics: `MetricStore` walks the table of `table.py` for what each step did.

`prometheus.py` prints its snapshot, `LLM.get_metrics()` returns it. Knows no metric by name, except
the two ratios of speculative decoding, and nothing of Prometheus or HTTP.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quire.core.stats import IterationStats, StepStats
from quire.observability.metrics.table import CACHE_INFO, METRICS, Metric, MetricKind, Source
from quire.observability.sinks import HitRate

TOGETHER: Final = 16
"""Records of facts that wait for each other, unless somebody asks before. Eighty rows read them: a
process that sleeps between steps has none of these in its caches, and so fetches them for all."""
_INFO_NAMES: Final = {"num_blocks": "num_gpu_blocks"}


def buckets_1_2_5(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    series = (float(m * 10**e) for e in range(len(str(limit))) for m in (1, 2, 5))
    return tuple(bound for bound in series if bound <= limit)


@dataclass(frozen=True, slots=True)
class Counter:
    """A value that only grows."""

    name: str
    labels: dict[str, str]
    value: int | float
    """Whole, except for counters of seconds."""


@dataclass(frozen=True, slots=True)
class Vector:
    """Values that only grow, by position."""

    name: str
    labels: dict[str, str]
    values: list[int]


@dataclass(frozen=True, slots=True)
class Gauge:
    """A current value."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations in buckets."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]
    """Cumulative counts by upper bound as text; the last is `+Inf`."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Observations without buckets."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float


Sample = Counter | Vector | Gauge | Histogram | Summary


class Bins:
    """Observations of one histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, values: Sequence[float]) -> None:
        """Count some: in a step there is one for each of its requests, and many are equal."""
        counts, bounds = self.counts, self.bounds
        last, place = math.nan, 0
        for value in values:
            if value != last:
                last, place = value, bisect_left(bounds, value)
            counts[place] += 1
        self.total = sum(values, self.total)

    def cumulative(self) -> dict[str, int]:
        """By upper bound as text, the smaller ones included; `+Inf` last."""
        running, result = 0, {}
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            result[bound] = running
        return result


class Tally:
    """A count that one thread adds to and another takes from."""

    def __init__(self) -> None:
        self._counts: deque[int] = deque()

    def add(self, count: int) -> None:
        """Count."""
        self._counts.append(count)

    def take(self) -> int:
        """What was counted since the last call."""
        return sum(self._counts.popleft() for _ in range(len(self._counts)))


_Read = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Feed:
    """The rows of one source, sorted once by what is done with their values: it is done in every
    step, and asking each row what it is took longer than reading it."""

    histograms: list[tuple[_Read, Bins]]
    counters: list[tuple[_Read, dict[Any, float]]]
    gauges: list[tuple[_Read, dict[Any, float]]]
    labelled: list[tuple[_Read, dict[Any, float], bool]]
    """The last says whether values are added up."""

    def take(self, facts: object) -> None:
        """Read all rows."""
        for read, bins in self.histograms:
            if values := read(facts):
                bins.observe(values)
        for read, values in self.counters:
            values[""] += read(facts)
        for read, values in self.gauges:
            values[""] = read(facts)
        for read, values, grows in self.labelled:
            for label, value in read(facts).items():
                values[label] = values.get(label, 0) + value if grows else value


class MetricStore:
    """The values of all metrics of one engine. A `StatSink`.

    Args:
        model_name: Value of the label `model_name`.
        engine: Value of the label `engine`.
        max_model_len: Last bucket of the histograms that count tokens per request.
        options: The options that are on; rows that need any other are absent.
    """

    def __init__(
        self,
        model_name: str,
        engine: str = "0",
        max_model_len: int = 32768,
        options: Collection[str] = (),
    ) -> None:
        self.labels: Final = {"model_name": model_name, "engine": engine}
        self.hit_rate = HitRate()
        self.dropped_spans = Tally()
        self.spare_is_ready: Callable[[], bool] = bool
        """Asked when metrics are collected."""
        self._engine = engine
        self._info: dict[str, str] = {}
        # The engine's thread records and any thread may collect, so a short lock guards both.
        self._lock = threading.Lock()
        self._unread: deque[tuple[StepStats | None, IterationStats | None]] = deque()
        self._tokens = buckets_1_2_5(max_model_len)
        self._values: dict[str, dict[Any, float]] = {}
        self._bins: dict[str, Bins] = {}
        self.rows: Final = tuple(m for m in METRICS if m.option is None or m.option in options)
        for metric in self.rows:
            if metric.kind is MetricKind.HISTOGRAM:
                self._bins[metric.name] = Bins(metric.buckets or self._tokens)
            else:
                children = metric.label_values or (() if metric.label else ("",))
                self._values[metric.name] = dict.fromkeys(children, 0)
        self._feeds: Final = {source: self._feed_of(source) for source in Source}

    def _feed_of(self, source: Source) -> _Feed:
        """The rows of a source by what is done with their values."""
        feed = _Feed([], [], [], [])
        for metric in self.rows:
            if metric.source is not source:
                continue
            if metric.kind is MetricKind.HISTOGRAM:
                feed.histograms.append((metric.read, self._bins[metric.name]))
                continue
            values, grows = self._values[metric.name], metric.kind is not MetricKind.GAUGE
            if metric.label:
                feed.labelled.append((metric.read, values, grows))
            elif grows:
                feed.counters.append((metric.read, values))
            else:
                feed.gauges.append((metric.read, values))
        return feed

    def set_cache_config(self, config: Mapping[str, object]) -> None:
        """Labels of `vllm:cache_config_info`: the fields of the KV cache's configuration.

        `num_blocks` is shown as `num_gpu_blocks`, the name that routers look for.
        """
        self._info = {_INFO_NAMES.get(key, key): str(value) for key, value in config.items()}

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """Take facts, which are not to change any more. They are read `TOGETHER`."""
        with self._lock:
            self._unread.append((step, iteration))
            if len(self._unread) >= TOGETHER:
                self._read()

    def _read(self) -> None:
        """Read every row that facts feed."""
        while self._unread:
            step, iteration = self._unread.popleft()
            if step is not None:
                self.hit_rate.extend(step.prefix_lookups)
                self._feeds[Source.STEP].take(step)
            if iteration is not None:
                self._feeds[Source.ITERATION].take(iteration)
                for finished in iteration.finished:
                    self._feeds[Source.FINISHED].take(finished)

    def snapshot(self) -> list[Sample]:
        """All values, consistent with one another."""
        with self._lock:
            self._read()
            self._feeds[Source.STORE].take(self)
            samples = [sample for metric in self.rows for sample in self._samples(metric)]
        if self._info:
            samples.append(Gauge(CACHE_INFO, {"engine": self._engine, **self._info}, 1.0))
        return samples

    def _samples(self, metric: Metric) -> Iterable[Sample]:
        if metric.kind is MetricKind.HISTOGRAM:
            bins, counts = self._bins[metric.name], self._bins[metric.name].cumulative()
            yield Histogram(metric.name, dict(self.labels), counts["+Inf"], bins.total, counts)
            return
        values = self._values[metric.name]
        if metric.kind is MetricKind.VECTOR:
            positions = [int(values[key]) for key in sorted(values)]
            yield Vector(metric.name, dict(self.labels), positions)
            return
        for label, value in values.items():
            labels = {**self.labels, metric.label: label} if metric.label else dict(self.labels)
            if metric.kind is MetricKind.COUNTER:
                yield Counter(metric.name, labels, value)
            else:
                yield Gauge(metric.name, labels, float(value))

    # ---- rows that are made of other rows ----------------------------------------------------

    def share_accepted(self) -> float:
        """Accepted draft tokens divided by draft tokens, 0 to 1; 0 without drafts."""
        return self._spec("accepted_tokens") / (self._spec("draft_tokens") or 1)

    def spec_efficiency(self) -> float:
        """Tokens that verified drafts gave, divided by what they could have given at best, 0 to 1.
        A draft of k tokens gives k + 1 tokens if all of them are right. 0 without drafts."""
        drafts = self._spec("drafts")
        at_best = self._spec("draft_tokens") + drafts
        return (self._spec("accepted_tokens") + drafts) / (at_best or 1)

    def _spec(self, what: str) -> float:
        return self._values[f"vllm:spec_decode_num_{what}"][""]
