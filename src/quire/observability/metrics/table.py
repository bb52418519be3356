"""Every metric is one row of `METRICS`: name, kind, help, buckets, and how to read it from the
facts.

`MetricStore` walks the table for each step and keeps the values; `prometheus.py` prints them and
`LLM.get_metrics()` returns them as objects; docs/metrics.md and the dashboards under deploy/ are
generated from it. Names, labels and buckets are vLLM's. Names that older dashboards query are rows
of their own with the same value.

Knows nothing of Prometheus or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from quire.core.stats import RECOVERY_PARTS, FinishedRequestStats, IterationStats, StepStats
from quire.outputs import FinishReason


class MetricKind(Enum):
    """What a metric is to Prometheus."""

    COUNTER = "counter"
    VECTOR = "vector"
    """Counters whose label is a position: 0, 1, 2, ..."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


class Source(Enum):
    """The record a row reads its value from. A row is read once for each such record."""

    STEP = StepStats
    ITERATION = IterationStats
    FINISHED = FinishedRequestStats
    STORE = "store"
    """The store itself, when metrics are collected."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row.

    `read` returns a counter's increment, a gauge's value, or a histogram's observations. With
    `label`, it returns a mapping from label value to these.
    """

    name: str
    kind: MetricKind
    help: str
    source: Source
    read: Callable[[Any], Any]
    buckets: tuple[float, ...] = ()
    """Upper bounds without infinity. Empty for a histogram means 1, 2, 5, 10, ... up to the model's
    length."""
    label: str | None = None
    label_values: tuple[str, ...] = ()
    """Label values that exist from the start, at 0."""
    option: str | None = None
    """The option without which the row is absent."""


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
MILLISECOND_BUCKETS: Final = (
    1.0, 2.0, 3.0, 5.0, 8.0, 10.0, 20.0, 30.0, 50.0, 80.0, 100.0, 200.0, 300.0, 500.0, 800.0,
    1000.0, 2000.0, 3000.0,
)
RESIDENCY_BUCKETS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0,
    120.0, 300.0, 600.0, 1200.0, 1800.0,
)



def _known(**values: float | None) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


_C, _G, _H, _V = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM, MetricKind.VECTOR
_STEP, _ITER, _DONE, _STORE = Source.STEP, Source.ITERATION, Source.FINISHED, Source.STORE

METRICS: Final = (
    # Scheduler state after the step.
    Metric("vllm:num_requests_running", _G, "Requests running.", _STEP, lambda s: s.num_running),
    Metric("vllm:num_requests_waiting", _G, "Requests waiting.", _STEP, lambda s: s.num_waiting),
    Metric("vllm:num_requests_waiting_by_reason", _G, "Requests waiting, by reason.", _STEP,
           lambda s: {"capacity": s.num_waiting - s.num_compiling, "deferred": s.num_compiling},
           label="reason",
           label_values=("capacity", "deferred")),
    Metric("vllm:num_requests_kv_fetch_by_stage", _G,
           "Requests whose KV comes from another engine, by stage.", _STORE, lambda store: {},
           label="stage",
           label_values=("waiting_to_start", "in_progress", "completed_waiting")),
    Metric("vllm:kv_cache_usage_perc", _G, "Share of KV blocks in use, 0 to 1.", _STEP,
           lambda s: s.kv_cache_usage),
    Metric("vllm:gpu_cache_usage_perc", _G, "Old name of vllm:kv_cache_usage_perc.", _STEP,
           lambda s: s.kv_cache_usage),
    Metric("vllm:num_preemptions", _C, "Preemptions.", _STEP, lambda s: s.num_preempted),
    Metric("vllm:kv_block_lifetime_seconds", _H,
           "From the time a KV block was taken to the eviction of its content.", _STEP,
           lambda s: [lifetime for lifetime, _, _ in s.stays], RESIDENCY_BUCKETS,
           option="kv_cache_metrics"),
    Metric("vllm:kv_block_idle_before_evict_seconds", _H,
           "From the last use of a cached KV block to the eviction of its content.", _STEP,
           lambda s: [idle for _, idle, _ in s.stays], RESIDENCY_BUCKETS,
           option="kv_cache_metrics"),
    Metric("vllm:kv_block_reuse_gap_seconds", _H,
           "From a use of a cached KV block to the next that found it; told at its eviction.",
           _STEP, lambda s: [gap for _, _, gaps in s.stays for gap in gaps], RESIDENCY_BUCKETS,
           option="kv_cache_metrics"),
    Metric("vllm:engine_sleep_state", _G, "1 at the state the engine is in.", _STORE,
           lambda store: {"awake": 1}, label="sleep_state",
           label_values=("awake", "weights_offloaded", "discard_all")),
    # Second KV tier. The first two have the names of vLLM V0.
    Metric("vllm:num_requests_swapped", _G, "Requests whose KV is in the second tier.", _STEP,
           lambda s: s.num_swapped),
    Metric("vllm:cpu_cache_usage_perc", _G, "Share of the second tier that requests hold, 0 to 1.",
           _STEP, lambda s: s.swap_usage),
    Metric("vllm:kv_offload_cpu_cache_usage_perc", _G,
           "Share of the second tier that requests or copies hold, 0 to 1.", _STEP,
           lambda s: s.swap_usage),
    Metric("vllm:kv_blocks_swapped_out", _C, "KV blocks copied to the second tier.", _STEP,
           lambda s: s.num_blocks_swapped_out),
    Metric("vllm:kv_blocks_swapped_in", _C, "KV blocks copied back from the second tier.", _STEP,
           lambda s: s.num_blocks_swapped_in),
    Metric("vllm:kv_swap_failures", _C,
           "KV blocks that could not be written to the second tier, or read back.", _STEP,
           lambda s: s.num_swap_failures),
    Metric("quire:integrity_failures", _C,
           "Times that the scheduler's books did not agree with themselves and were made anew: "
           "a bug. Nothing is lost; the log says what was wrong.", _STEP,
           lambda s: s.num_integrity_failures),
    Metric("quire:kv_blocks_shed", _C,
           "Cached KV blocks that were given up because the machine's memory ran short.", _STEP,
           lambda s: s.num_shed_blocks),
    # Prefix cache, in tokens.
    Metric("vllm:prefix_cache_queries", _C, "Tokens looked up in the prefix cache.", _STEP,
           lambda s: s.prefix_queries),
    Metric("vllm:prefix_cache_hits", _C, "Tokens found in the prefix cache.", _STEP,
           lambda s: s.prefix_hits),
    Metric("quire:prefix_cache_missed", _C,
           "Tokens looked up in the prefix cache that had been in it and were evicted.", _STEP,
           lambda s: s.prefix_missed),
    Metric("vllm:gpu_prefix_cache_queries", _C, "Old name of vllm:prefix_cache_queries.", _STEP,
           lambda s: s.prefix_queries),
    Metric("vllm:gpu_prefix_cache_hits", _C, "Old name of vllm:prefix_cache_hits.", _STEP,
           lambda s: s.prefix_hits),
    Metric("vllm:prefix_cache_hit_rate", _G, "Share of recent prefix lookups that hit, 0 to 1.",
           _STORE, lambda store: store.hit_rate.value),
    Metric("vllm:gpu_prefix_cache_hit_rate", _G, "Old name of vllm:prefix_cache_hit_rate.",
           _STORE, lambda store: store.hit_rate.value),
    Metric("vllm:external_prefix_cache_queries", _C,
           "Tokens looked up in a cache outside this engine.", _STORE, lambda store: 0),
    Metric("vllm:external_prefix_cache_hits", _C,
           "Tokens found in a cache outside this engine.", _STORE, lambda store: 0),
    Metric("vllm:mm_cache_queries", _C, "Images and sounds looked up among processed ones.",
           _STORE, lambda store: 0),
    Metric("vllm:mm_cache_hits", _C, "Images and sounds found among processed ones.", _STORE,
           lambda store: 0),
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
    Metric("vllm:prompt_tokens_cached_by_source", _C, "Cached prompt tokens by where their KV was.",
           _ITER,
           lambda i: {"device": i.num_cached_tokens - sum(i.promoted_tokens.values()),
                      **i.promoted_tokens},
           label="source",
           label_values=("device", "host", "p2p", "disk", "external_unspecified")),
    Metric("vllm:generation_tokens", _C, "Generated tokens.", _ITER,
           lambda i: i.num_generation_tokens),
    Metric("vllm:tokens", _C, "Prompt and generated tokens; a name of vLLM V0.", _ITER,
           lambda i: i.num_prompt_tokens + i.num_generation_tokens),
    Metric("vllm:iteration_tokens_total", _H, "Prompt and generated tokens per step.", _STEP,
           lambda s: (s.num_prompt_tokens + s.num_generation_tokens,), ITERATION_BUCKETS),
    # Speculative decoding. The two ratios have names of vLLM V0.
    Metric("vllm:spec_decode_num_drafts", _C, "Drafts that were verified.", _STEP,
           lambda s: s.num_drafts),
    Metric("vllm:spec_decode_num_draft_tokens", _C, "Draft tokens that were verified.", _STEP,
           lambda s: s.num_draft_tokens),
    Metric("vllm:spec_decode_num_accepted_tokens", _C, "Draft tokens that the model confirmed.",
           _STEP, lambda s: s.num_accepted_tokens),
    Metric("vllm:spec_decode_num_accepted_tokens_per_pos", _V,
           "Draft tokens that the model confirmed, by their place in the draft.", _STEP,
           lambda s: dict(enumerate(s.num_accepted_per_pos)), label="position"),
    Metric("vllm:spec_decode_draft_acceptance_rate", _G,
           "Share of all draft tokens so far that the model confirmed, 0 to 1.", _STORE,
           lambda store: store.share_accepted()),
    Metric("vllm:spec_decode_system_efficiency", _G,
           "Share of the tokens that would have come if every draft had been right, 0 to 1.",
           _STORE, lambda store: store.spec_efficiency()),
    # The engine's own time.
    Metric("vllm:engine_steps", _C, "Engine steps.", _STEP, lambda s: 1),
    Metric("vllm:engine_step_seconds", _C, "Seconds that steps took, by part.", _STEP,
           lambda s: {"schedule": s.schedule_seconds, "forward": s.forward_seconds,
                      "sample": s.sample_seconds, "update": s.update_seconds},
           label="part", label_values=("schedule", "forward", "sample", "update")),
    # Children of these appear with the first reading: not every system tells.
    Metric("quire:cpu_wait_seconds", _C,
           "Seconds by which steps and the pauses before them were late because their threads had "
           "no core, and that the API process's event loop was ready to run and had none.", _STEP,
           lambda s: _known(
               core=_sum(s.cpu_wait_seconds, s.gap_wait_seconds, s.unread_wait_seconds),
               api=s.api_wait_seconds), label="process"),
    Metric("quire:cpu_withheld_seconds", _C,
           "Seconds that the control group was throttled by its quota, and CPU seconds that the "
           "hypervisor took.", _STEP,
           lambda s: _known(quota=s.machine and s.machine.throttled_seconds,
                            hypervisor=s.machine and s.machine.stolen_seconds), label="by"),
    Metric("vllm:model_forward_time_milliseconds", _H, "Time of the model's forward per step.",
           _STEP, lambda s: (1000 * s.forward_seconds,), MILLISECOND_BUCKETS),
    Metric("vllm:model_execute_time_milliseconds", _H, "Time of forward and sampling per step.",
           _STEP, lambda s: (1000 * (s.forward_seconds + s.sample_seconds),), MILLISECOND_BUCKETS),
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
    Metric("vllm:time_in_queue_requests", _H, "Old name of vllm:request_queue_time_seconds.", _DONE,
           lambda f: (f.queue_time,), LATENCY_BUCKETS),
    Metric("vllm:request_inference_time_seconds", _H, "First scheduled to last token.", _DONE,
           lambda f: (f.inference_time,), LATENCY_BUCKETS),
    Metric("vllm:request_prefill_time_seconds", _H, "First scheduled to first token.", _DONE,
           lambda f: (f.prefill_time,), LATENCY_BUCKETS),
    Metric("vllm:request_decode_time_seconds", _H, "First token to last token.", _DONE,
           lambda f: (f.decode_time,), LATENCY_BUCKETS),
    Metric("vllm:admission_rejections", _C,
           "Requests refused at a queue limit or for their deadline.", _ITER,
           lambda i: i.admission_rejections, label="reason",
           label_values=("max_num_queued_reqs", "max_num_queued_tokens", "max_queued_bytes",
                         "deadline")),
    Metric("quire:core_stalls", _C,
           "Engine cores that were stuck, by how: stopped by a signal, still (a deadlock), slow (a "
           "step took five times what it should, or longer), deaf or mute.", _ITER,
           lambda i: i.core_stalls, label="kind",
           label_values=("stopped", "still", "slow", "deaf", "mute")),
    Metric("quire:slow_readers", _C,
           "Requests ended because their clients left too much unread (--max-buffered-bytes).",
           _ITER, lambda i: i.num_slow_readers),
    Metric("quire:spare_core_ready", _G,
           "Whether a spare process is ready to take the place of the engine core.", _STORE,
           lambda store: int(store.spare_is_ready()), option="warm_spare"),
    Metric("quire:core_recovery_seconds", _H,
           "From the death of an engine core until the next one has continued its requests.",
           _ITER, lambda i: [i.core_recovery["total"]] if i.core_recovery else [],
           TTFT_BUCKETS),
    Metric("quire:core_recovery_part_seconds", _C,
           "Seconds that each part of these recoveries took.", _ITER,
           lambda i: {part: i.core_recovery.get(part, 0) for part in RECOVERY_PARTS}
           if i.core_recovery else {}, label="part", label_values=RECOVERY_PARTS),
    # Of adapters and text watermarks there is nothing to count: no sample.
    Metric("vllm:lora_requests", _C, "Requests by the LoRA adapter that served them.", _STORE,
           lambda store: {}, label="lora_name"),
    Metric("vllm:lora_requests_info", _G,
           "Time of the last step with adapters, in seconds since 1970.", _STORE,
           lambda store: {}, label="running_lora_adapters"),
    Metric("vllm:watermark_requests", _C, "Requests whose text was watermarked, by outcome.",
           _STORE, lambda store: {}, label="status"),
    Metric("quire:trace_spans_dropped", _C, "Trace spans that could not be sent.", _STORE,
           lambda store: store.dropped_spans.take()),
    # What requests looked like.
    Metric("vllm:request_success", _C, "Requests that ended, by reason.", _DONE,
           lambda f: {f.finish_reason: 1}, label="finished_reason",
           label_values=tuple(str(reason) for reason in FinishReason)),
    Metric("vllm:corrupted_requests", _C,
           "Requests that failed because the model's output was not a finite number.", _DONE,
           lambda f: int(f.corrupted)),
    Metric("vllm:request_prompt_tokens", _H, "Prompt tokens per request.", _DONE,
           lambda f: (f.num_prompt_tokens,)),
    Metric("vllm:request_generation_tokens", _H, "Generated tokens per request.", _DONE,
           lambda f: (f.num_generation_tokens,)),
    Metric("vllm:request_max_num_generation_tokens", _H,
           "Generated tokens of the longest completion, per request.", _DONE,
           lambda f: () if f.longest is None else (f.longest,)),
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
CACHE_INFO_HELP: Final = "Configuration of the KV cache, as labels."
