"""Metrics that vLLM guides name (rows G), and the endpoint that shows them (row E1)."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.observability.metrics.store import Gauge, Histogram
from watched import PROMPT, TOKENS, Watched


def test_e1_metrics_endpoint(seen: Watched) -> None:
    """`GET /metrics` is Prometheus text with `vllm:` names; `HEAD` answers without a body."""
    assert "# TYPE vllm:num_requests_running gauge" in seen.text
    assert "process_resident_memory_bytes" in seen.text and "python_gc_" in seen.text
    assert seen.statuses == {"HEAD": 200, "HEAD bytes": 0}


def test_g1_num_requests_running(seen: Watched) -> None:
    """Requests running: at most `--max-num-seqs`, and 0 at the end."""
    assert 1 <= seen.value("vllm:num_requests_running", peak=True) <= 4
    assert seen.value("vllm:num_requests_running") == 0


def test_g2_num_requests_waiting(seen: Watched) -> None:
    """Requests waiting, and why."""
    assert seen.value("vllm:num_requests_waiting", peak=True) >= 1
    by_reason = "vllm:num_requests_waiting_by_reason"
    assert seen.value(by_reason, peak=True, reason="capacity") >= 1
    assert seen.value(by_reason, reason="deferred") == 0


def test_g3_num_requests_swapped(seen: Watched) -> None:
    """Requests swapped out: none without a second tier."""
    assert seen.value("vllm:num_requests_swapped", peak=True) == 0


def test_g10_cpu_cache_usage(seen: Watched) -> None:
    """Usage of the second tier: 0 without one (with one: tests/observability)."""
    assert seen.value("vllm:cpu_cache_usage_perc", peak=True) == 0


def test_g4_num_preemptions(seen: Watched) -> None:
    """Preemptions are counted."""
    assert seen.value("vllm:num_preemptions_total") >= 1


@pytest.mark.parametrize("name", ["prefix_cache_hit_rate", "gpu_prefix_cache_hit_rate"])
def test_g5_g6_prefix_cache_hit_rate(seen: Watched, name: str) -> None:
    """Both old gauges are the share of looked-up tokens that hit."""
    queries = seen.value("vllm:prefix_cache_queries_total")
    hits = seen.value("vllm:prefix_cache_hits_total")
    assert seen.value(f"vllm:{name}") == pytest.approx(hits / queries)


def test_g7_prefix_cache_counters(seen: Watched) -> None:
    """Queries and hits are counted in tokens; here all prompts equal the first."""
    hits = seen.value("vllm:prefix_cache_hits_total")
    assert 0 < hits < seen.value("vllm:prefix_cache_queries_total")


@pytest.mark.parametrize("name", ["gpu_cache_usage_perc", "kv_cache_usage_perc"])
def test_g8_g9_kv_cache_usage(seen: Watched, name: str) -> None:
    """Usage is 0 to 1 under both names: nearly 1 under load, 0 when no request holds a block."""
    assert 0.8 < seen.value(f"vllm:{name}", peak=True) <= 1
    assert seen.value(f"vllm:{name}") == 0


def test_g11_iteration_tokens(seen: Watched) -> None:
    """Tokens per step: the sum is the number of tokens computed, the count the number of steps."""
    assert seen.value("vllm:iteration_tokens_total_count") == seen.value("vllm:engine_steps_total")
    assert seen.value("vllm:iteration_tokens_total_bucket", le="16384.0") > 0


def test_g12_time_to_first_token(seen: Watched) -> None:
    """One observation per completion."""
    assert seen.value("vllm:time_to_first_token_seconds_count") == len(seen.completed) + 1
    assert 0 < seen.mean("vllm:time_to_first_token_seconds") < 60


def test_g13_time_per_output_token(seen: Watched) -> None:
    """The old name and its two successors agree on the sum of the time between tokens."""
    old = seen.value("vllm:time_per_output_token_seconds_sum")
    assert old == seen.value("vllm:inter_token_latency_seconds_sum") > 0
    assert seen.value("vllm:request_time_per_output_token_seconds_count") >= len(seen.completed)


def test_g14_e2e_request_latency(seen: Watched) -> None:
    """End to end is at least queue plus inference."""
    parts = sum(
        seen.value(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "inference")
    )
    assert seen.value("vllm:e2e_request_latency_seconds_sum") >= parts > 0


def test_g15_token_counters(seen: Watched) -> None:
    """Prompt tokens, in total and by source; generated tokens."""
    prompt = seen.value("vllm:prompt_tokens_total")
    assert prompt == seen.value("vllm:prompt_tokens_by_source_total") > 0
    assert seen.value("vllm:generation_tokens_total") >= len(seen.completed) * TOKENS


def test_g16_corrupted_requests(seen: Watched) -> None:
    """Requests that failed on numbers that were not finite: none here."""
    assert seen.value("vllm:corrupted_requests_total") == 0


def test_g17_aborts_are_counted(seen: Watched) -> None:
    """A client that disconnects counts as `abort`; every reason exists from the start."""
    name = "vllm:request_success_total"
    assert seen.value(name, finished_reason="abort") == 1
    assert seen.value(name, finished_reason="length") == len(seen.completed)
    for reason in ("stop", "error", "repetition"):
        assert seen.value(name, finished_reason=reason) == 0


@pytest.mark.parametrize("name", ["draft_acceptance_rate", "system_efficiency"])
def test_g18_g19_speculation_ratios(seen: Watched, name: str) -> None:
    """Both old gauges exist, and are 0 without drafts (with drafts: tests/observability)."""
    assert seen.value(f"vllm:spec_decode_{name}") == 0
    assert seen.value("vllm:spec_decode_num_draft_tokens_total") == 0


def test_g24_memory_has_metrics(seen: Watched) -> None:
    """Latency, throughput and memory: KV blocks as labels, memory of the process."""
    labels = next(dict(own) for name, own in seen.last if name == "vllm:cache_config_info")
    assert labels["num_gpu_blocks"] == "24" and labels["block_size"] == "16"
    assert labels["enable_prefix_caching"] == "True"
    assert seen.value("process_resident_memory_bytes") > 2**20


def test_g20_lora_requests(seen: Watched) -> None:
    """Requests by LoRA adapter: announced, but without a sample while no adapter is served."""
    assert "# TYPE vllm:lora_requests_total counter" in seen.text
    assert "# TYPE vllm:lora_requests_info gauge" in seen.text
    assert not any(name.startswith("vllm:lora") for name, _ in seen.last)


def test_g3_g10_with_a_second_tier() -> None:
    """With `--swap-space`, swapped requests and the usage of the tier show under load, under the
    old name and the new, and prompt tokens found there count as `host`."""
    options = {"num_gpu_blocks_override": 24, "swap_space": 0.01, "preemption_mode": "swap"}
    peaks: dict[str, float] = {}
    with LLM(disable_log_stats=False, max_model_len=256, **options) as llm:  # type: ignore[arg-type]
        engine = llm.llm_engine
        params = SamplingParams(temperature=1, max_tokens=100, ignore_eos=True)
        for number in range(6):
            engine.add_request(f"r{number}", f"{number}. {PROMPT}", params)
        while engine.has_unfinished_requests:
            engine.step()
            for sample in llm.get_metrics():
                if isinstance(sample, Gauge):
                    peaks[sample.name] = max(sample.value, peaks.get(sample.name, 0.0))
        found = llm.generate(f"0. {PROMPT}", params.replace(max_tokens=1), use_tqdm=False)
        counts = {
            sample.labels["source"]: sample.value
            for sample in llm.get_metrics()
            if sample.name == "vllm:prompt_tokens_cached_by_source"
        }
    assert peaks["vllm:num_requests_swapped"] >= 1
    assert 0 < peaks["vllm:cpu_cache_usage_perc"] <= 1
    assert peaks["vllm:kv_offload_cpu_cache_usage_perc"] == peaks["vllm:cpu_cache_usage_perc"]
    assert 16 <= counts["host"] <= (found[0].num_cached_tokens or 0)
    assert counts["disk"] == 0


def test_kv_cache_metrics() -> None:
    """`--kv-cache-metrics` measures how long cached blocks live, lie idle and wait for reuse;
    without it these metrics are absent."""
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(
        disable_log_stats=False,
        num_gpu_blocks_override=8,
        max_model_len=96,
        kv_cache_metrics=True,
        kv_cache_metrics_sample=1.0,
    ) as llm:
        llm.generate(PROMPT, params, use_tqdm=False)
        llm.generate(PROMPT, params, use_tqdm=False)
        llm.generate([f"{number}: {PROMPT}" for number in range(8)], params, use_tqdm=False)
        found = {s.name: s for s in llm.get_metrics() if isinstance(s, Histogram)}
    lifetime = found["vllm:kv_block_lifetime_seconds"]
    idle = found["vllm:kv_block_idle_before_evict_seconds"]
    gaps = found["vllm:kv_block_reuse_gap_seconds"]
    assert lifetime.count == idle.count > 0 and gaps.count > 0
    assert 0 <= idle.sum <= lifetime.sum and gaps.sum > 0
    for options, words in (
        ({"disable_log_stats": True}, "needs statistics"),
        ({"kv_cache_metrics_sample": 0.0}, r"\(0, 1\], got 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(**{"kv_cache_metrics": True, "disable_log_stats": False, **options})  # type: ignore[arg-type]
    with LLM(disable_log_stats=False) as plain:
        assert not any("kv_block_" in s.name for s in plain.get_metrics() if "swap" not in s.name)


def test_get_metrics_is_refused_without_statistics() -> None:
    """`LLM.get_metrics()` says what to set if statistics are off."""
    with LLM() as llm, pytest.raises(ConfigError, match="disable_log_stats=False"):
        llm.get_metrics()


def test_http_metrics(seen: Watched) -> None:
    """The server counts its HTTP requests, their duration and sizes by route."""
    where = {"handler": "/v1/completions", "method": "POST"}
    asked = len(seen.completed) + 1
    assert seen.value("http_requests_total", status="2xx", **where) == asked
    assert seen.value("http_request_duration_seconds_count", **where) == asked
    assert seen.value("http_request_duration_highr_seconds_count") >= asked
    assert seen.value("http_request_size_bytes_sum", handler="/v1/completions") > asked * len(
        PROMPT
    )
    assert (
        seen.value("http_response_size_bytes_sum", handler="/v1/completions") > (asked - 1) * TOKENS
    )
