"""Every metric is one row of `METRICS`: name, kind, help, buckets, how to read it from the facts.

`MetricStore` walks the table for each step and keeps the values; `prometheus.py` prints them and
`LLM.get_metrics()` returns them as objects. Names, labels and buckets are vLLM's, and the names
that older dashboards ask for are rows of their own with the same value.

Knows nothing of Prometheus or HTTP.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from quire.core.stats import FinishedRequestStats, IterationStats, StepStats
from quire.observability.sinks import HitRate
from quire.outputs import FinishReason


class Kind(Enum):
    """What a metric is to Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(Enum):
    """Which facts a row reads. A row is read once per such record."""

    STEP = StepStats
    ITERATION = IterationStats
    FINISHED = FinishedRequestStats
    STORE = "store"
    """The store itself, when metrics are collected."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row.

    `read` gives a counter's increment, a gauge's value, or a histogram's observations; with
    `label` it gives a mapping from label value to those.
    """

    name: str
    kind: Kind
    help: str
    source: Source
    read: Callable[[Any], Any]
    buckets: tuple[float, ...] = ()
    """Upper bounds without infinity; empty on a histogram: 1-2-5 up to the model's length."""
    label: str | None = None
    label_values: tuple[str, ...] = ()
    """Children that exist from the start, at 0."""


# fmt: off
TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
ITL_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)
LATENCY_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)
ITERATION_BUCKETS: Final = (
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
)
N_BUCKETS: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTION_BUCKETS: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_STEP, _ITER, _DONE, _STORE = Source.STEP, Source.ITERATION, Source.FINISHED, Source.STORE

METRICS: Final = (
    # Scheduler state after the step.
    Metric("vllm:num_requests_running", _G, "Requests running.", _STEP, lambda s: s.num_running),
    Metric("vllm:num_requests_waiting", _G, "Requests waiting.", _STEP, lambda s: s.num_waiting),
    Metric("vllm:num_requests_waiting_by_reason", _G, "Requests waiting, by reason.", _STEP,
           lambda s: {"capacity": s.num_waiting}, label="reason",
           label_values=("capacity", "deferred")),
    # Preemption recomputes, so no request is ever swapped out; older dashboards plot it.
    Metric("vllm:kv_cache_usage_perc", _G, "Share of KV blocks in use, 0 to 1.", _STEP,
           lambda s: s.kv_cache_usage),
    Metric("vllm:gpu_cache_usage_perc", _G, "Old name of vllm:kv_cache_usage_perc.", _STEP,
           lambda s: s.kv_cache_usage),
    Metric("vllm:num_preemptions", _C, "Preemptions.", _STEP, lambda s: s.num_preempted),
    # Second KV tier. The first two have the names of vLLM V0.
    Metric("vllm:num_requests_swapped", _G, "Requests whose KV is in the second tier.", _STEP,
           lambda s: s.num_swapped),
    Metric("vllm:cpu_cache_usage_perc", _G, "Share of the second tier that requests hold, 0 to 1.",
           _STEP, lambda s: s.swap_usage),
    Metric("vllm:kv_blocks_swapped_out", _C, "KV blocks copied to the second tier.", _STEP,
           lambda s: s.num_blocks_swapped_out),
    Metric("vllm:kv_blocks_swapped_in", _C, "KV blocks copied back from the second tier.", _STEP,
           lambda s: s.num_blocks_swapped_in),
    Metric("vllm:kv_swap_failures", _C,
           "KV blocks that could not be written to the second tier, or read back.", _STEP,
           lambda s: s.num_swap_failures),
    # Prefix cache, in tokens.
    Metric("vllm:prefix_cache_queries", _C, "Tokens looked up in the prefix cache.", _STEP,
           lambda s: s.prefix_queries),
    Metric("vllm:prefix_cache_hits", _C, "Tokens found in the prefix cache.", _STEP,
           lambda s: s.prefix_hits),
    Metric("vllm:gpu_prefix_cache_queries", _C, "Old name of vllm:prefix_cache_queries.", _STEP,
           lambda s: s.prefix_queries),
    Metric("vllm:gpu_prefix_cache_hits", _C, "Old name of vllm:prefix_cache_hits.", _STEP,
           lambda s: s.prefix_hits),
    Metric("vllm:prefix_cache_hit_rate", _G, "Share of recent prefix lookups that hit, 0 to 1.",
           _STORE, lambda store: store.hit_rate.value),
    Metric("vllm:gpu_prefix_cache_hit_rate", _G, "Old name of vllm:prefix_cache_hit_rate.",
           _STORE, lambda store: store.hit_rate.value),
    # Tokens.
    Metric("vllm:prompt_tokens", _C, "Prompt tokens of prefilled requests, cached ones included.",
           _ITER, lambda i: i.num_prompt_tokens),
    Metric("vllm:prompt_tokens_by_source", _C, "Prompt tokens by where their KV came from.", _ITER,
           lambda i: {"local_compute": i.num_prompt_tokens - i.num_cached_tokens,
                      "local_cache_hit": i.num_cached_tokens},
           label="source",
           label_values=("local_compute", "local_cache_hit", "external_kv_transfer")),
    Metric("vllm:prompt_tokens_cached", _C, "Prompt tokens whose KV was cached.", _ITER,
           lambda i: i.num_cached_tokens),
    Metric("vllm:generation_tokens", _C, "Generated tokens.", _ITER,
           lambda i: i.num_generation_tokens),
    Metric("vllm:iteration_tokens_total", _H, "Prompt and generated tokens per step.", _STEP,
           lambda s: (s.num_prompt_tokens + s.num_generation_tokens,), ITERATION_BUCKETS),
    # Latency as the caller sees it, in seconds.
    Metric("vllm:time_to_first_token_seconds", _H, "Arrival to first output.", _ITER,
           lambda i: i.time_to_first_token, TTFT_BUCKETS),
    Metric("vllm:inter_token_latency_seconds", _H, "Time between successive outputs.", _ITER,
           lambda i: i.inter_token_latency, ITL_BUCKETS),
    Metric("vllm:time_per_output_token_seconds", _H,
           "Old name of vllm:inter_token_latency_seconds.", _ITER,
           lambda i: i.inter_token_latency, ITL_BUCKETS),
    Metric("vllm:request_time_per_output_token_seconds", _H,
           "Decode time per token after the first, one value per request.", _DONE,
           lambda f: (f.decode_time / (f.num_generation_tokens - 1),)
           if f.num_generation_tokens > 1 else (), ITL_BUCKETS),
    Metric("vllm:e2e_request_latency_seconds", _H, "Arrival to end.", _DONE,
           lambda f: (f.e2e_time,), LATENCY_BUCKETS),
    Metric("vllm:request_queue_time_seconds", _H, "Queued to first scheduled.", _DONE,
           lambda f: (f.queue_time,), LATENCY_BUCKETS),
    Metric("vllm:request_inference_time_seconds", _H, "First scheduled to last token.", _DONE,
           lambda f: (f.inference_time,), LATENCY_BUCKETS),
    Metric("vllm:request_prefill_time_seconds", _H, "First scheduled to first token.", _DONE,
           lambda f: (f.prefill_time,), LATENCY_BUCKETS),
    Metric("vllm:request_decode_time_seconds", _H, "First token to last token.", _DONE,
           lambda f: (f.decode_time,), LATENCY_BUCKETS),
    Metric("vllm:admission_rejections", _C, "Requests refused at a queue limit, by limit.", _ITER,
           lambda i: i.admission_rejections, label="reason",
           label_values=("max_num_queued_reqs", "max_num_queued_tokens")),
    Metric("quire:trace_spans_dropped", _C, "Trace spans that could not be sent.", _STORE,
           lambda store: store.dropped_spans.take()),
    # What requests looked like.
    Metric("vllm:request_success", _C, "Requests that ended, by reason.", _DONE,
           lambda f: {f.finish_reason: 1}, label="finished_reason",
           label_values=tuple(str(reason) for reason in FinishReason)),
    Metric("vllm:request_prompt_tokens", _H, "Prompt tokens per request.", _DONE,
           lambda f: (f.num_prompt_tokens,)),
    Metric("vllm:request_generation_tokens", _H, "Generated tokens per request.", _DONE,
           lambda f: (f.num_generation_tokens,)),
    Metric("vllm:request_prefill_kv_computed_tokens", _H,
           "Prompt tokens computed per request, cache hits excluded.", _DONE,
           lambda f: (f.num_prompt_tokens - f.num_cached_tokens,)),
    Metric("vllm:request_params_n", _H, "Parameter n of requests.", _DONE,
           lambda f: (f.n,), N_BUCKETS),
    Metric("vllm:request_params_max_tokens", _H, "Parameter max_tokens of requests.", _DONE,
           lambda f: () if f.max_tokens is None else (f.max_tokens,)),
    Metric("vllm:request_num_preemptions", _H, "Preemptions per request.", _DONE,
           lambda f: (f.num_preemptions,), PREEMPTION_BUCKETS),
)
# fmt: on

CACHE_INFO: Final = "vllm:cache_config_info"
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
    value: int


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value of this moment."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by upper bound."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]
    """Cumulative counts by upper bound as text; the last is `+Inf`."""


Sample = Counter | Gauge | Histogram


class _Bins:
    """Observations of one histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> dict[str, int]:
        running, result = 0, {}
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            result[bound] = running
        return result


class Tally:
    """Counts on one thread what another one collects."""

    def __init__(self) -> None:
        self._counts: deque[int] = deque()

    def add(self, count: int) -> None:
        """Count."""
        self._counts.append(count)

    def take(self) -> int:
        """What was counted since the last call."""
        return sum(self._counts.popleft() for _ in range(len(self._counts)))


class MetricStore:
    """The values of all metrics of one engine. A `StatSink`.

    Args:
        model_name: Value of the label `model_name`.
        engine: Value of the label `engine`.
        max_model_len: Last bucket of the histograms that count tokens per request.
    """

    def __init__(self, model_name: str, engine: str = "0", max_model_len: int = 32768) -> None:
        self.labels: Final = {"model_name": model_name, "engine": engine}
        self.hit_rate = HitRate()
        self.dropped_spans = Tally()
        self._engine = engine
        self._info: dict[str, str] = {}
        # Recording happens on the engine's thread, collecting on any: one short critical section.
        self._lock = threading.Lock()
        self._tokens = buckets_1_2_5(max_model_len)
        self._values: dict[str, dict[str, float]] = {}
        self._bins: dict[str, _Bins] = {}
        for metric in METRICS:
            self._create(metric)

    def _create(self, metric: Metric) -> None:
        if metric.kind is Kind.HISTOGRAM:
            self._bins[metric.name] = _Bins(metric.buckets or self._tokens)
        else:
            self._values[metric.name] = dict.fromkeys(metric.label_values or ("",), 0)

    def set_cache_config(self, config: Mapping[str, object]) -> None:
        """Labels of `vllm:cache_config_info`: the fields of the KV cache's configuration.

        `num_blocks` is shown as `num_gpu_blocks`, the name that routers look for.
        """
        self._info = {_INFO_NAMES.get(key, key): str(value) for key, value in config.items()}

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """Read every row that the given facts feed."""
        with self._lock:
            if step is not None:
                self.hit_rate.extend(step.prefix_lookups)
                self._feed(Source.STEP, step)
            if iteration is not None:
                self._feed(Source.ITERATION, iteration)
                for finished in iteration.finished:
                    self._feed(Source.FINISHED, finished)

    def _feed(self, source: Source, facts: object) -> None:
        for metric in _BY_SOURCE[source]:
            read = metric.read(facts)
            if metric.kind is Kind.HISTOGRAM:
                bins = self._bins[metric.name]
                for value in read:
                    bins.observe(value)
                continue
            values = self._values[metric.name]
            for label, value in (read if metric.label else {"": read}).items():
                grows = metric.kind is Kind.COUNTER
                values[label] = values.get(label, 0) + value if grows else value

    def snapshot(self) -> list[Sample]:
        """All values, consistent with one another."""
        with self._lock:
            self._feed(Source.STORE, self)
            samples = [sample for metric in METRICS for sample in self._samples(metric)]
        if self._info:
            samples.append(Gauge(CACHE_INFO, {"engine": self._engine, **self._info}, 1.0))
        return samples

    def _samples(self, metric: Metric) -> Iterable[Sample]:
        if metric.kind is Kind.HISTOGRAM:
            bins, counts = self._bins[metric.name], self._bins[metric.name].cumulative()
            yield Histogram(metric.name, dict(self.labels), counts["+Inf"], bins.total, counts)
            return
        for label, value in self._values[metric.name].items():
            labels = {**self.labels, metric.label: label} if metric.label else dict(self.labels)
            if metric.kind is Kind.COUNTER:
                yield Counter(metric.name, labels, int(value))
            else:
                yield Gauge(metric.name, labels, float(value))


_BY_SOURCE: Final = {
    source: tuple(metric for metric in METRICS if metric.source is source) for source in Source
}
