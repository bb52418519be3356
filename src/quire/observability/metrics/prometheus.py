"""Prometheus text of a `MetricStore` and of `HttpMetrics`. The only module that imports
`prometheus_client`.

Knows nothing of single metrics: those are rows of `metrics.METRICS` and `HTTP_METRICS`.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from quire.core.stats import IterationStats, StepStats
from quire.observability.metrics.exposition import render
from quire.observability.metrics.http_metrics import HTTP_METRICS, HttpMetrics
from quire.observability.metrics.store import (
    Counter,
    Gauge,
    Histogram,
    MetricStore,
    Sample,
    Summary,
    Vector,
)
from quire.observability.metrics.table import CACHE_INFO, CACHE_INFO_HELP, MetricKind
from quire.utils.timing import Clock, RealClock

MAX_AGE: Final = 0.25
"""Seconds for which a rendered text is served again while no request ends, so that a storm of
scrapes costs one rendering."""


class PrometheusSink:
    """Keeps the metrics of one engine and prints them. A `StatSink`.

    Args:
        model_name: Value of the label `model_name`.
        engine: Value of the label `engine`.
        max_model_len: Last bucket of the histograms that count tokens per request.
        clock: Decides when a rendered text is too old.
        enabled: If false, only the metrics of the process and its garbage collector are shown,
            because values that nothing updates would be wrong.
        options: Options whose metrics are wanted.
    """

    def __init__(
        self,
        model_name: str,
        engine: str = "0",
        max_model_len: int = 32768,
        clock: Clock | None = None,
        enabled: bool = True,
        options: Collection[str] = (),
    ) -> None:
        self.store = MetricStore(model_name, engine, max_model_len, options)
        self._clock = clock or RealClock()
        self._registry = CollectorRegistry(auto_describe=False)
        if enabled:
            self._registry.register(_StoreCollector(self.store))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._lock = threading.Lock()
        self._ended = 0
        """Records so far in which a request ended or was refused."""
        self._text: tuple[float, int, bytes] | None = None
        """When it was made, `_ended` before it was made, and the text."""

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """Take the facts of one step."""
        self.store.record(step, iteration)
        if iteration is not None and (iteration.finished or iteration.admission_rejections):
            self._ended += 1  # after the store has them: a text of this number shows them

    def set_cache_config(self, config: Mapping[str, object]) -> None:
        """Labels of `vllm:cache_config_info`."""
        self.store.set_cache_config(config)

    def snapshot(self) -> list[Sample]:
        """All values as objects."""
        return self.store.snapshot()

    def render(self) -> bytes:
        """Prometheus text, at most `MAX_AGE` seconds old, that counts every request that has ended.
        Takes milliseconds: call it on a thread."""
        with self._lock:
            now, ended = self._clock.now(), self._ended
            if self._text is None or now - self._text[0] >= MAX_AGE or ended != self._text[1]:
                self._text = now, ended, render(self._registry.collect())
            return self._text[2]


class _StoreCollector(Collector):
    """Gives a store's snapshot to `prometheus_client`."""

    def __init__(self, store: MetricStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Family]:
        found = _by_name(self._store.snapshot())
        for row in self._store.rows:
            yield _family(row.name, row.kind, row.help, found.get(row.name, []), row.label)
        if CACHE_INFO in found:
            yield _family(CACHE_INFO, MetricKind.GAUGE, CACHE_INFO_HELP, found[CACHE_INFO])


class _HttpCollector(Collector):
    """Gives what the HTTP side counts to `prometheus_client`."""

    def __init__(self, metrics: HttpMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        found = _by_name(self._metrics.snapshot())
        for row in HTTP_METRICS:
            yield _family(row.name, row.kind, row.help, found.get(row.name, []))


class HttpText:
    """Prometheus text of what the HTTP side counts."""

    def __init__(self, metrics: HttpMetrics) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_HttpCollector(metrics))

    def render(self) -> bytes:
        """The text as of now. Takes a millisecond: call it on a thread."""
        return render(self._registry.collect())


_FAMILIES: Final = {
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.VECTOR: CounterMetricFamily,
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
    MetricKind.SUMMARY: SummaryMetricFamily,
}


def _by_name(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.name, []).append(sample)
    return found


def _family(
    name: str, kind: MetricKind, help: str, samples: list[Sample], position: str | None = None
) -> Family:
    """One metric with all its label combinations. Without any, it is still announced.

    Args:
        name, kind, help: Of the row.
        samples: Of this name.
        position: Name of the label that numbers a vector's values.
    """
    labels = list(samples[0].labels) if samples else []
    if kind is MetricKind.VECTOR:
        labels.append(position or "")
    family: Any = _FAMILIES[kind](name, help, labels=labels)
    for sample in samples:
        values = list(sample.labels.values())
        match sample:
            case Vector():
                for place, value in enumerate(sample.values):
                    family.add_metric([*values, str(place)], value)
            case Histogram():
                family.add_metric(values, list(sample.buckets.items()), sample.sum)
            case Summary():
                family.add_metric(values, sample.count, sample.sum)
            case Counter() | Gauge():
                family.add_metric(values, sample.value)
    made: Family = family
    return made
