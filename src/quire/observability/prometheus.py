"""Prometheus text of a `MetricStore`. The one door to `prometheus_client`.

Knows nothing of single metrics: those are rows of `metrics.METRICS`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from quire.core.stats import IterationStats, StepStats
from quire.observability.exposition import render
from quire.observability.metric_store import Counter, Histogram, MetricStore, Sample, Vector
from quire.observability.metrics import CACHE_INFO, CACHE_INFO_HELP, METRICS
from quire.utils.timing import Clock, RealClock

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MAX_AGE: Final = 0.25
"""Seconds for which a text is handed out again: a storm of scrapes costs one rendering."""

_HELP: Final = {metric.name: metric.help for metric in METRICS} | {CACHE_INFO: CACHE_INFO_HELP}
_LABELS: Final = {metric.name: metric.label for metric in METRICS}


class PrometheusSink:
    """Keeps the metrics of one engine and prints them. A `StatSink`.

    Args:
        model_name: Value of the label `model_name`.
        engine: Value of the label `engine`.
        max_model_len: Last bucket of the histograms that count tokens per request.
        clock: Decides when a rendered text is too old.
        enabled: Without it only the process and its garbage collector are shown: a value that
            nothing feeds would not be true.
    """

    def __init__(
        self,
        model_name: str,
        engine: str = "0",
        max_model_len: int = 32768,
        clock: Clock | None = None,
        enabled: bool = True,
    ) -> None:
        self.store = MetricStore(model_name, engine, max_model_len)
        self._clock = clock or RealClock()
        self._registry = CollectorRegistry(auto_describe=False)
        if enabled:
            self._registry.register(_StoreCollector(self.store))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._lock = threading.Lock()
        self._text: tuple[float, bytes] | None = None

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """Take the facts of one step."""
        self.store.record(step, iteration)

    def set_cache_config(self, config: Mapping[str, object]) -> None:
        """Labels of `vllm:cache_config_info`."""
        self.store.set_cache_config(config)

    def snapshot(self) -> list[Sample]:
        """All values as objects."""
        return self.store.snapshot()

    def render(self) -> bytes:
        """Prometheus text, at most `MAX_AGE` seconds old. Takes milliseconds: call in a thread."""
        with self._lock:
            now = self._clock.now()
            if self._text is None or now - self._text[0] >= MAX_AGE:
                self._text = now, render(self._registry.collect())
            return self._text[1]


class _StoreCollector(Collector):
    """Shows a store's snapshot to `prometheus_client`."""

    def __init__(self, store: MetricStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Family]:
        for name, samples in groupby(self._store.snapshot(), key=lambda sample: sample.name):
            yield _family(name, list(samples))


def _family(name: str, samples: list[Sample]) -> Family:
    """One metric with all its label combinations."""
    first, names = samples[0], list(samples[0].labels)
    if isinstance(first, Histogram):
        histogram = HistogramMetricFamily(name, _HELP[name], labels=names)
        for sample in samples:
            assert isinstance(sample, Histogram)
            buckets = list(sample.buckets.items())
            histogram.add_metric(list(sample.labels.values()), buckets, sample.sum)
        return histogram
    if isinstance(first, Vector):
        return _by_position(first)
    kind = CounterMetricFamily if isinstance(first, Counter) else GaugeMetricFamily
    family = kind(name, _HELP[name], labels=names)
    for sample in samples:
        assert not isinstance(sample, (Histogram, Vector))
        family.add_metric(list(sample.labels.values()), sample.value)
    return family


def _by_position(vector: Vector) -> Family:
    """A vector as counters, one for each position."""
    label = _LABELS[vector.name]
    assert label is not None
    family = CounterMetricFamily(vector.name, _HELP[vector.name], labels=[*vector.labels, label])
    for position, value in enumerate(vector.values):
        family.add_metric([*vector.labels.values(), str(position)], value)
    return family
