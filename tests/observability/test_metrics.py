"""Names, kinds, labels, buckets and values of metrics, as objects and as Prometheus text."""

from __future__ import annotations

import math
import sys
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.core.stats import FinishedRequestStats, IterationStats, MachineStats, StepStats
from quire.engine.cores.watchdog import KINDS
from quire.observability.metrics.prometheus import MAX_AGE, PrometheusSink
from quire.observability.metrics.store import (
    TOGETHER,
    Counter,
    Gauge,
    Histogram,
    MetricStore,
    Vector,
    buckets_1_2_5,
)
from quire.observability.metrics.table import METRICS, MetricKind
from quire.utils.timing import ManualClock

DONE = FinishedRequestStats(
    finish_reason="stop",
    e2e_time=1.2,
    queue_time=0.1,
    prefill_time=0.4,
    decode_time=0.6,
    inference_time=1.0,
    num_prompt_tokens=30,
    num_generation_tokens=4,
    num_cached_tokens=16,
    num_preemptions=1,
    n=2,
    max_tokens=None,
    corrupted=True,
    longest=7,
)
STEP = StepStats(
    num_running=3,
    num_waiting=2,
    kv_cache_usage=0.25,
    num_prompt_tokens=14,
    num_generation_tokens=2,
    num_preempted=1,
    num_swapped=4,
    swap_usage=0.5,
    num_blocks_swapped_out=6,
    num_blocks_swapped_in=5,
    num_swap_failures=1,
    num_integrity_failures=3,
    num_shed_blocks=9,
    prefix_queries=30,
    prefix_hits=16,
    prefix_missed=8,
    cpu_wait_seconds=0.3125,
    gap_wait_seconds=0.125,
    unread_wait_seconds=0.0625,
    api_wait_seconds=0.25,
    machine=MachineStats(7.0, 1.0, 3.0, 2, stolen_seconds=0.125, throttled_seconds=None),
    prefix_lookups=[(20, 16), (10, 0)],
    stays=[(3.0, 1.0, [0.5, 0.25]), (2.0, 0.125, [])],
    num_drafts=2,
    num_draft_tokens=6,
    num_accepted_tokens=3,
    num_accepted_per_pos=[2, 1, 0],
    schedule_seconds=0.001,
    forward_seconds=0.008,
    sample_seconds=0.002,
    update_seconds=0.0005,
)
ITERATION = IterationStats(
    num_prompt_tokens=30,
    num_cached_tokens=16,
    promoted_tokens={"disk": 5},
    num_generation_tokens=3,
    time_to_first_token=[0.05],
    inter_token_latency=[0.02, 0.03],
    finished=[DONE],
    num_slow_readers=4,
    core_recovery={"imports": 0.5, "prefill": 0.25, "total": 0.875},
)

GAUGES = {
    "num_requests_running": 3,
    "num_requests_waiting": 2,
    "num_requests_swapped": 4,
    "cpu_cache_usage_perc": 0.5,
    "kv_offload_cpu_cache_usage_perc": 0.5,
    "kv_cache_usage_perc": 0.25,
    "gpu_cache_usage_perc": 0.25,
    "prefix_cache_hit_rate": 16 / 30,
    "gpu_prefix_cache_hit_rate": 16 / 30,
    "spec_decode_draft_acceptance_rate": 0.5,
    "spec_decode_system_efficiency": (3 + 2) / (6 + 2),
}
COUNTERS = {
    "quire:slow_readers": 8,
    "num_preemptions": 2,
    "kv_blocks_swapped_out": 12,
    "kv_blocks_swapped_in": 10,
    "kv_swap_failures": 2,
    "quire:integrity_failures": 6,
    "quire:kv_blocks_shed": 18,
    "prefix_cache_queries": 60,
    "prefix_cache_hits": 32,
    "quire:prefix_cache_missed": 16,
    "gpu_prefix_cache_queries": 60,
    "gpu_prefix_cache_hits": 32,
    "prompt_tokens": 60,
    "prompt_tokens_cached": 32,
    "generation_tokens": 6,
    "tokens": 66,
    "external_prefix_cache_queries": 0,
    "external_prefix_cache_hits": 0,
    "mm_cache_queries": 0,
    "mm_cache_hits": 0,
    "corrupted_requests": 2,
    "spec_decode_num_drafts": 4,
    "spec_decode_num_draft_tokens": 12,
    "spec_decode_num_accepted_tokens": 6,
    "engine_steps": 2,
}
# name: (sum, count) of two records
HISTOGRAMS = {
    "quire:core_recovery_seconds": (1.75, 2),
    "time_to_first_token_seconds": (0.1, 2),
    "inter_token_latency_seconds": (0.1, 4),
    "time_per_output_token_seconds": (0.1, 4),
    "request_time_per_output_token_seconds": (0.4, 2),
    "e2e_request_latency_seconds": (2.4, 2),
    "request_queue_time_seconds": (0.2, 2),
    "time_in_queue_requests": (0.2, 2),
    "request_inference_time_seconds": (2.0, 2),
    "request_prefill_time_seconds": (0.8, 2),
    "request_decode_time_seconds": (1.2, 2),
    "request_prompt_tokens": (60, 2),
    "request_generation_tokens": (8, 2),
    "request_prefill_kv_computed_tokens": (28, 2),
    "request_max_num_generation_tokens": (14, 2),
    "model_forward_time_milliseconds": (16, 2),
    "model_execute_time_milliseconds": (20, 2),
    "request_params_n": (4, 2),
    "request_params_max_tokens": (0, 0),
    "request_num_preemptions": (2, 2),
    "iteration_tokens_total": (32, 2),
    "kv_block_lifetime_seconds": (10, 4),
    "kv_block_idle_before_evict_seconds": (2.25, 4),
    "kv_block_reuse_gap_seconds": (1.5, 4),
}
ABSENT = {"lora_requests", "lora_requests_info", "watermark_requests"}
"""Announced, and without a sample: there is nothing that could be counted."""


@pytest.fixture
def sink() -> PrometheusSink:
    made = PrometheusSink(
        "demo", max_model_len=2048, clock=ManualClock(), options=["kv_cache_metrics", "warm_spare"]
    )
    for _ in range(2):
        made.record(STEP, ITERATION)
    return made


def parsed(sink: PrometheusSink) -> dict[tuple[str, str], float]:
    """Values by sample name and by the labels beyond the two that all have."""
    values = {}
    for family in text_string_to_metric_families(sink.render().decode()):
        for sample in family.samples:
            if sample.name.startswith(("vllm:", "quire:")):
                labels = dict(sample.labels)
                assert labels.pop("engine") == "0"
                if sample.name != "vllm:cache_config_info":
                    assert labels.pop("model_name") == "demo"
                extra = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
                values[sample.name.removeprefix("vllm:"), extra] = sample.value
    return values


def test_every_value_in_the_text(sink: PrometheusSink) -> None:
    values = parsed(sink)
    for name, value in GAUGES.items():
        assert values[name, ""] == pytest.approx(value), name
    for name, value in COUNTERS.items():
        assert values[name + "_total", ""] == value, name
    for name, (total, count) in HISTOGRAMS.items():
        assert values[name + "_sum", ""] == pytest.approx(total), name
        assert values[name + "_count", ""] == values[name + "_bucket", "le=+Inf"] == count, name


def test_no_row_is_untested() -> None:
    labelled = {
        "num_requests_waiting_by_reason",
        "num_requests_kv_fetch_by_stage",
        "prompt_tokens_by_source",
        "request_success",
        "admission_rejections",
        "quire:core_stalls",
        "engine_sleep_state",
        "engine_step_seconds",
        "quire:core_recovery_part_seconds",
        "prompt_tokens_cached_by_source",
        "spec_decode_num_accepted_tokens_per_pos",
        "quire:cpu_wait_seconds",
        "quire:cpu_withheld_seconds",
    }
    names = {metric.name.removeprefix("vllm:") for metric in METRICS}
    of_the_store = {"quire:trace_spans_dropped", "quire:spare_core_ready"}
    valued = set(GAUGES) | set(COUNTERS) | set(HISTOGRAMS)
    assert names == valued | labelled | of_the_store | ABSENT


def test_what_needs_an_option_is_absent_without_it(sink: PrometheusSink) -> None:
    plain = PrometheusSink("demo")
    plain.record(STEP, ITERATION)
    assert b"kv_block_" not in plain.render() and b"kv_block_" in sink.render()


def test_what_cannot_be_counted_is_announced_without_a_value(sink: PrometheusSink) -> None:
    text = sink.render().decode()
    for name in ABSENT:
        found = [line for line in text.splitlines() if name + "_total" in line or name in line]
        assert found and all(line.startswith("#") for line in found), found


def test_a_spare_is_asked_for_at_the_scrape(sink: PrometheusSink) -> None:
    assert parsed(sink)["quire:spare_core_ready", ""] == 0
    other = PrometheusSink("demo", options=["warm_spare"])
    other.store.spare_is_ready = lambda: True
    assert parsed(other)["quire:spare_core_ready", ""] == 1
    assert b"spare_core" not in PrometheusSink("demo").render()


def test_dropped_spans_count_once() -> None:
    store = PrometheusSink("demo").store
    store.dropped_spans.add(3)
    store.dropped_spans.add(4)
    for _ in range(2):
        (value,) = [s.value for s in store.snapshot() if s.name == "quire:trace_spans_dropped"]
        assert value == 7


def test_labelled_children_exist_from_the_start() -> None:
    values = parsed(PrometheusSink("demo"))
    for reason in ("stop", "length", "abort", "error", "repetition"):
        assert values["request_success_total", f"finished_reason={reason}"] == 0
    assert values["prompt_tokens_by_source_total", "source=external_kv_transfer"] == 0


def test_labelled_values(sink: PrometheusSink) -> None:
    values = parsed(sink)
    assert values["request_success_total", "finished_reason=stop"] == 2
    assert values["request_success_total", "finished_reason=abort"] == 0
    assert values["num_requests_waiting_by_reason", "reason=capacity"] == 2
    assert values["quire:cpu_wait_seconds_total", "process=core"] == 1
    assert values["quire:cpu_wait_seconds_total", "process=api"] == 0.5
    assert values["quire:cpu_withheld_seconds_total", "by=hypervisor"] == 0.25
    assert ("quire:cpu_withheld_seconds_total", "by=quota") not in values, "nobody could read it"
    assert values["engine_sleep_state", "sleep_state=awake"] == 1
    assert values["engine_sleep_state", "sleep_state=discard_all"] == 0
    assert values["prompt_tokens_cached_by_source_total", "source=device"] == 32 - 10
    assert values["prompt_tokens_cached_by_source_total", "source=disk"] == 10
    assert values["prompt_tokens_cached_by_source_total", "source=host"] == 0
    seconds = {"schedule": 0.002, "forward": 0.016, "sample": 0.004, "update": 0.001}
    for part, value in seconds.items():
        assert values["engine_step_seconds_total", f"part={part}"] == pytest.approx(value)
    for part, value in {"imports": 1.0, "prefill": 0.5, "process": 0}.items():
        assert values["quire:core_recovery_part_seconds_total", f"part={part}"] == value
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [values[name, f"position={k}"] for k in range(3)] == [4, 2, 0]
    by_source = {
        label: value
        for (name, label), value in values.items()
        if name == "prompt_tokens_by_source_total"
    }
    assert by_source == {
        "source=local_compute": 28,
        "source=local_cache_hit": 32,
        "source=external_kv_transfer": 0,
    }


def test_rejections_are_counted_by_limit() -> None:
    sink = PrometheusSink("demo", clock=ManualClock())
    for _ in range(3):
        sink.record(None, IterationStats(admission_rejections={"max_num_queued_reqs": 1}))
    values = parsed(sink)
    assert values["admission_rejections_total", "reason=max_num_queued_reqs"] == 3
    assert values["admission_rejections_total", "reason=max_num_queued_tokens"] == 0


def test_stalls_are_counted_by_kind() -> None:
    sink = PrometheusSink("demo", clock=ManualClock())
    sink.record(None, IterationStats(core_stalls={"slow": 2}))
    text = sink.render().decode()
    for kind in KINDS:
        line = f'quire:core_stalls_total{{engine="0",kind="{kind}",model_name="demo"}}'
        assert f"{line} {2.0 * (kind == 'slow')}" in text


def test_buckets(sink: PrometheusSink) -> None:
    values = parsed(sink)

    def bounds(name: str) -> list[float]:
        found = [label for key, label in values if key == f"{name}_bucket"]
        return [float(label.removeprefix("le=")) for label in found]

    itl = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
           20, 40, 80]  # fmt: skip
    ttft = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
            20, 40, 80, 160, 640, 2560]  # fmt: skip
    latency = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
               1920, 7680]  # fmt: skip
    tokens = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    stays = [m * 10.0**e for e in (-3, -2, -1) for m in (1, 2, 5)]
    stays += [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800]
    milliseconds = [1, 2, 3, 5, 8, 10, 20, 30, 50, 80, 100, 200, 300, 500, 800, 1000, 2000, 3000]
    expected = {
        "inter_token_latency_seconds": itl,
        "time_per_output_token_seconds": itl,
        "request_time_per_output_token_seconds": itl,
        "time_to_first_token_seconds": ttft,
        "quire:core_recovery_seconds": ttft,
        "iteration_tokens_total": [1] + [2**k for k in range(3, 15)],
        "request_params_n": [1, 2, 5, 10, 20],
        "request_num_preemptions": [1, 2, 3, 4, 5, 10, 20],
        "request_prompt_tokens": tokens,
        "request_generation_tokens": tokens,
        "request_params_max_tokens": tokens,
        "request_prefill_kv_computed_tokens": tokens,
        "request_max_num_generation_tokens": tokens,
        "model_forward_time_milliseconds": milliseconds,
        "model_execute_time_milliseconds": milliseconds,
        "time_in_queue_requests": latency,
        "kv_block_lifetime_seconds": stays,
        "kv_block_idle_before_evict_seconds": stays,
        "kv_block_reuse_gap_seconds": stays,
        **{name: latency for name in HISTOGRAMS if name.startswith("e2e") or "_time_s" in name},
    }
    assert set(expected) == set(HISTOGRAMS)
    for name, bound in expected.items():
        assert bounds(name) == [*bound, math.inf], name


def test_observations_on_a_bound_count_below_it() -> None:
    store = MetricStore("m")
    store.record(None, IterationStats(time_to_first_token=[0.1, 0.1001]))
    ttft = next(s for s in store.snapshot() if s.name == "vllm:time_to_first_token_seconds")
    assert isinstance(ttft, Histogram)
    assert (ttft.buckets["0.08"], ttft.buckets["0.1"], ttft.buckets["0.25"]) == (0, 1, 2)


def test_a_snapshot_has_all_that_was_recorded() -> None:
    store = MetricStore("m")
    for i in range(1, 2 * TOGETHER + 4):
        gaps = [0.01, 0.01, 0.3, 0.01, 0.5][: i % 6]
        store.record(StepStats(num_running=i), IterationStats(1, 0, inter_token_latency=gaps))
        if i % 5 == 0 or i > 2 * TOGETHER:
            found = {s.name: s for s in store.snapshot()}
            running, prompts = found["vllm:num_requests_running"], found["vllm:prompt_tokens"]
            assert isinstance(running, Gauge) and isinstance(prompts, Counter)
            assert (running.value, prompts.value) == (i, i)
            itl = found["vllm:inter_token_latency_seconds"]
            assert isinstance(itl, Histogram)
            sizes = [j % 6 for j in range(1, i + 1)]
            assert itl.count == sum(sizes)
            assert itl.buckets["0.01"] == sum(min(n, 2) + (n > 3) for n in sizes)
            assert itl.buckets["0.3"] == sum(min(n, 4) for n in sizes)


@pytest.mark.parametrize(
    ("limit", "last", "count"), [(1, 1, 1), (9, 5, 3), (10, 10, 4), (4096, 2000, 11)]
)
def test_1_2_5(limit: int, last: float, count: int) -> None:
    made = buckets_1_2_5(limit)
    assert (made[-1], len(made)) == (last, count)


def test_one_token_has_no_time_per_output_token() -> None:
    one = FinishedRequestStats("stop", 1, 0, 1, 0, 1, 5, 1, 0, 0, 1, 16)
    sink = PrometheusSink("demo")
    sink.record(None, IterationStats(finished=[one]))
    values = parsed(sink)
    assert values["request_time_per_output_token_seconds_count", ""] == 0
    assert values["request_params_max_tokens_sum", ""] == 16


def test_cache_config(sink: PrometheusSink) -> None:
    assert not any(name == "cache_config_info" for name, _ in parsed(sink))
    sink.set_cache_config({"block_size": 16, "num_blocks": 100})
    sink._text = None
    assert parsed(sink)["cache_config_info", "block_size=16,num_gpu_blocks=100"] == 1


def test_process_metrics_are_there(sink: PrometheusSink) -> None:
    text = sink.render().decode()
    for name in ("process_resident_memory_bytes", "python_info", "python_gc_collections_total"):
        assert f"\n{name}" in text


def test_without_statistics_no_value_is_claimed() -> None:
    text = PrometheusSink("demo", enabled=False).render().decode()
    assert "vllm:" not in text and "process_resident_memory_bytes" in text


def test_ratios_without_drafts_are_zero() -> None:
    values = parsed(PrometheusSink("demo"))
    assert values["spec_decode_draft_acceptance_rate", ""] == 0
    assert values["spec_decode_system_efficiency", ""] == 0


def test_text_is_rendered_at_most_four_times_a_second() -> None:
    clock = ManualClock()
    sink = PrometheusSink("demo", clock=clock)
    first = sink.render()
    sink.record(STEP, None)
    assert sink.render() is first
    clock.advance(MAX_AGE)
    assert sink.render() != first


def test_a_request_that_ended_is_in_the_next_text_whatever_its_age() -> None:
    sink = PrometheusSink("demo", clock=ManualClock())
    sink.render()
    for number in range(1, 4):
        sink.record(None, IterationStats(finished=[DONE]))
        assert parsed(sink)["request_success_total", "finished_reason=stop"] == number
    before = sink.render()
    assert sink.render() is before, "nothing ended: no second rendering"
    sink.record(None, IterationStats(admission_rejections={"max_num_queued_reqs": 1}))
    assert sink.render() is not before


def test_snapshot_as_objects(sink: PrometheusSink) -> None:
    by_name = {}
    for sample in sink.snapshot():
        by_name.setdefault(sample.name, []).append(sample)
    kinds = {MetricKind.COUNTER: Counter, MetricKind.GAUGE: Gauge, MetricKind.HISTOGRAM: Histogram}
    kinds[MetricKind.VECTOR] = Vector
    for metric in METRICS:
        assert all(isinstance(s, kinds[metric.kind]) for s in by_name.get(metric.name, ()))
    assert {m.name for m in METRICS} - set(by_name) == {f"vllm:{name}" for name in ABSENT}
    assert by_name["vllm:num_preemptions"] == [
        Counter("vllm:num_preemptions", {"model_name": "demo", "engine": "0"}, 2)
    ]
    assert by_name["vllm:spec_decode_num_accepted_tokens_per_pos"] == [
        Vector(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            {"model_name": "demo", "engine": "0"},
            [4, 2, 0],
        )
    ]
    steps = by_name["vllm:iteration_tokens_total"][0]
    assert isinstance(steps, Histogram)
    assert (steps.count, steps.sum, steps.buckets["8.0"], steps.buckets["16.0"]) == (2, 32, 0, 2)


def test_recording_while_rendering_keeps_histograms_consistent() -> None:
    store, stop = MetricStore("m"), threading.Event()

    def record() -> None:
        while not stop.is_set():
            store.record(STEP, ITERATION)

    thread = threading.Thread(target=record)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(100):
            values = {s.name: s for s in store.snapshot()}
            steps, ttft = (
                values["vllm:iteration_tokens_total"],
                values["vllm:time_to_first_token_seconds"],
            )
            assert isinstance(steps, Histogram) and isinstance(ttft, Histogram)
            assert steps.count == ttft.count
            assert steps.sum == 16 * steps.count
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
