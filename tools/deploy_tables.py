"""What the dashboards show and the rules watch, as tables. `gen_deploy.py` writes the files."""

from __future__ import annotations

from dataclasses import dataclass, field

from metric_sections import grouped, series
from quire.observability.metrics.table import Metric, MetricKind

WINDOW = "$__rate_interval"
"""Grafana's own: at least four scrapes."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    targets: dict[str, str]
    """PromQL by legend."""
    unit: str = "short"
    text: str = ""
    stack: bool = False
    percent: bool = False
    """The axis goes from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Rule:
    """An alert, with inputs at which it fires and at which it does not (promtool's notation, one
    sample a minute, read after 20 minutes)."""

    alert: str
    expr: str
    wait: str
    severity: str
    summary: str
    remedy: str
    fires: dict[str, str] = field(default_factory=dict)
    quiet: dict[str, str] = field(default_factory=dict)


def quantile(share: float, name: str, window: str, where: str = "", by: str = "le") -> str:
    """A quantile of a histogram over all engines."""
    return f"histogram_quantile({share:g}, sum by ({by}) (rate({name}_bucket{where}[{window}])))"


OVERVIEW = (
    Panel(
        "Latency",
        {
            "TTFT p95": "histogram_quantile(0.95, "
            "rate(vllm:time_to_first_token_seconds_bucket[5m]))",
            "TTFT p99": "histogram_quantile(0.99, "
            "rate(vllm:time_to_first_token_seconds_bucket[5m]))",
            "TPOT p95": "histogram_quantile(0.95, "
            "rate(vllm:time_per_output_token_seconds_bucket[5m]))",
        },
        "s",
        "Time to first token and time per output token. TTFT high and TPOT fine: requests queue. "
        "TPOT spikes: long prompts share its steps; lower --max-num-batched-tokens.",
    ),
    Panel(
        "Throughput",
        {
            "generated": "rate(vllm:generation_tokens_total[1m])",
            "prompt": "rate(vllm:prompt_tokens_total[1m])",
        },
        "short",
        "Tokens per second.",
    ),
    Panel(
        "Requests",
        {
            "running": "vllm:num_requests_running",
            "waiting": "vllm:num_requests_waiting",
            "swapped": "vllm:num_requests_swapped",
        },
        "short",
        "Running at --max-num-seqs with a queue that grows: the server is saturated.",
        stack=True,
    ),
    Panel(
        "KV cache and preemptions",
        {
            "usage": "vllm:kv_cache_usage_perc",
            "preemptions/s": "rate(vllm:num_preemptions_total[5m])",
        },
        "short",
        "Usage near 1 with preemptions: there are more requests than the KV cache can hold.",
    ),
)
"""The four panels that vLLM guides ask for."""

_MODEL = '{model_name=~"$model"}'


def panel_of(metric: Metric) -> Panel:
    """One metric: a rate if it counts, its value if it is a gauge, quantiles if a histogram."""
    name = metric.name.removeprefix("vllm:")
    unit = "s" if name.endswith("_seconds") else "ms" if name.endswith("_milliseconds") else "short"
    legend = f"{{{{{metric.label}}}}}" if metric.label else "{{instance}}"
    by = metric.label or "instance"
    if metric.kind is MetricKind.HISTOGRAM:
        targets = {
            f"p{100 * share:g}": quantile(share, metric.name, WINDOW, _MODEL)
            for share in (0.5, 0.95, 0.99)
        }
        targets["mean"] = (
            f"sum(rate({metric.name}_sum{_MODEL}[{WINDOW}])) / "
            f"sum(rate({metric.name}_count{_MODEL}[{WINDOW}]))"
        )
        return Panel(name, targets, unit, metric.help)
    if metric.kind is MetricKind.GAUGE:
        share = name.endswith(("_perc", "_rate", "_efficiency"))
        return Panel(
            name,
            {legend: f"{'max' if share else 'sum'} by ({by}) ({series(metric)}{_MODEL})"},
            "percentunit" if share else "short",
            metric.help,
            percent=share,
        )
    rate = f"sum by ({by}) (rate({series(metric)}{_MODEL}[{WINDOW}]))"
    unit = "percentunit" if unit == "s" else "short"
    return Panel(f"{name} per second", {legend: rate}, unit, metric.help)


def full_board() -> list[tuple[str, list[Panel]]]:
    """Every metric, by section; older names of a metric are left out."""
    return [
        (section.title, [panel_of(m) for m in metrics if not m.help.startswith("Old name of ")])
        for section, metrics in grouped()
    ]


_AT = '{job="quire",instance="a:8000",engine="0",model_name="m"}'
_TTFT, _TPOT = "vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"


def _at(label: str) -> str:
    return _AT[:-1] + f",{label}}}"


def _histogram(name: str, below: str, bound: str) -> dict[str, str]:
    """One observation a second, all of them below `bound` and none below `below`."""
    return {
        f"{name}_bucket" + _at(f'le="{below}"'): "0x30",
        f"{name}_bucket" + _at(f'le="{bound}"'): "0+60x30",
        f"{name}_bucket" + _at('le="+Inf"'): "0+60x30",
    }


RULES = (
    Rule(
        "QuireDown",
        'up{job="quire"} == 0',
        "1m",
        "critical",
        "{{ $labels.instance }} cannot be scraped",
        "See its log: a server that gives up says why in its last line.",
        {'up{job="quire",instance="a:8000"}': "0x30"},
        {'up{job="quire",instance="a:8000"}': "1x30"},
    ),
    Rule(
        "QuireStuck",
        "vllm:num_requests_running > 0 and rate(vllm:engine_steps_total[1m]) == 0",
        "2m",
        "critical",
        "requests run but no step has ended for minutes",
        "Look at the core's log and stack (py-spy dump); /health says so too.",
        {f"vllm:num_requests_running{_AT}": "3x30", f"vllm:engine_steps_total{_AT}": "7x30"},
        {f"vllm:num_requests_running{_AT}": "3x30", f"vllm:engine_steps_total{_AT}": "0+60x30"},
    ),
    Rule(
        "QuireKVCacheHigh",
        "vllm:kv_cache_usage_perc > 0.9",
        "5m",
        "warning",
        "KV cache usage is {{ $value | humanizePercentage }}",
        "More KV memory (--kv-cache-memory-bytes), fewer requests at once (--max-num-seqs), or "
        "another replica.",
        {f"vllm:kv_cache_usage_perc{_AT}": "0.93x30"},
        {f"vllm:kv_cache_usage_perc{_AT}": "0.89x30"},
    ),
    Rule(
        "QuirePreemptions",
        "rate(vllm:num_preemptions_total[5m]) > 0.5",
        "0m",
        "warning",
        "{{ $value | humanize }} preemptions per second: work is done twice",
        "Lower --max-num-seqs, raise --watermark, or give the KV cache more memory.",
        {f"vllm:num_preemptions_total{_AT}": "0+60x30"},
        {f"vllm:num_preemptions_total{_AT}": "0+12x30"},
    ),
    Rule(
        "QuireKVCacheThrashing",
        "vllm:kv_cache_usage_perc > 0.95 and rate(vllm:num_preemptions_total[5m]) > 1",
        "0m",
        "critical",
        "the KV cache is full and requests push one another out",
        "Take load away now; then as for QuirePreemptions.",
        {
            f"vllm:kv_cache_usage_perc{_AT}": "0.97x30",
            f"vllm:num_preemptions_total{_AT}": "0+90x30",
        },
        {
            f"vllm:kv_cache_usage_perc{_AT}": "0.94x30",
            f"vllm:num_preemptions_total{_AT}": "0+90x30",
        },
    ),
    Rule(
        "QuireQueueGrows",
        "vllm:num_requests_waiting > 10",
        "5m",
        "warning",
        "{{ $value }} requests wait",
        "Add capacity; --max-num-queued-reqs refuses what cannot be served in time.",
        {f"vllm:num_requests_waiting{_AT}": "11x30"},
        {f"vllm:num_requests_waiting{_AT}": "10x30"},
    ),
    Rule(
        "QuireQueueLong",
        "vllm:num_requests_waiting > 50",
        "1m",
        "critical",
        "{{ $value }} requests wait",
        "Add capacity; --max-num-queued-reqs refuses what cannot be served in time.",
        {f"vllm:num_requests_waiting{_AT}": "51x30"},
        {f"vllm:num_requests_waiting{_AT}": "50x30"},
    ),
    Rule(
        "QuireTTFTHigh",
        f"{quantile(0.95, _TTFT, '5m', by='le, instance, model_name')} > 0.5",
        "5m",
        "warning",
        "p95 time to first token is {{ $value | humanizeDuration }}",
        "If requests wait, see QuireQueueGrows; else prompts are long: look at prefix cache hits.",
        _histogram(_TTFT, "0.75", "1.0"),
        _histogram(_TTFT, "0.1", "0.25"),
    ),
    Rule(
        "QuireTTFTVeryHigh",
        f"{quantile(0.99, _TTFT, '5m', by='le, instance, model_name')} > 0.8",
        "5m",
        "critical",
        "p99 time to first token is {{ $value | humanizeDuration }}",
        "As for QuireTTFTHigh.",
        _histogram(_TTFT, "1.0", "2.5"),
        _histogram(_TTFT, "0.5", "0.75"),
    ),
    Rule(
        "QuireTPOTHigh",
        f"{quantile(0.95, _TPOT, '5m', by='le, instance, model_name')} > 0.03",
        "5m",
        "warning",
        "p95 time per output token is {{ $value | humanizeDuration }}",
        "The threshold is what vLLM guides give for a large GPU; set it to what your model does. "
        "Spikes: lower --max-num-batched-tokens.",
        _histogram(_TPOT, "0.05", "0.075"),
        _histogram(_TPOT, "0", "0.025"),
    ),
    Rule(
        "QuireMachineStarved",
        "rate(quire:cpu_wait_seconds_total[5m]) > 0.3",
        "5m",
        "warning",
        "the {{ $labels.process }} process waits {{ $value | humanizePercentage }} of the time for "
        "a core",
        "Other work has its cores, or a CPU quota is used up: see quire:cpu_withheld_seconds_total "
        "and quire doctor.",
        {"quire:cpu_wait_seconds_total" + _at('process="core"'): "0+24x30"},
        {"quire:cpu_wait_seconds_total" + _at('process="core"'): "0+15x30"},
    ),
    Rule(
        "QuirePrefixCacheCold",
        "rate(quire:prefix_cache_missed_total[15m]) / rate(vllm:prefix_cache_queries_total[15m]) "
        "> 0.2",
        "30m",
        "info",
        "{{ $value | humanizePercentage }} of prompt tokens had been cached, but were evicted "
        "before they were asked for again",
        "More KV memory (--kv-cache-memory-bytes), a second tier (--swap-space), or routing by "
        "prefix; POST /explain_prefix says where a prompt leaves the cache.",
        {
            f"quire:prefix_cache_missed_total{_AT}": "0+300x90",
            f"vllm:prefix_cache_queries_total{_AT}": "0+1000x90",
        },
        # Prompts that are never sent again: evicted, but nobody misses them.
        {
            f"quire:prefix_cache_missed_total{_AT}": "0x90",
            f"vllm:prefix_cache_queries_total{_AT}": "0+1000x90",
        },
    ),
    Rule(
        "QuireFailures",
        'rate(vllm:request_success_total{finished_reason="error"}[5m]) > 0',
        "0m",
        "warning",
        "requests fail inside the engine",
        "The log names each of them and the reason.",
        {"vllm:request_success_total" + _at('finished_reason="error"'): "0+1x30"},
        {"vllm:request_success_total" + _at('finished_reason="error"'): "1x30"},
    ),
    Rule(
        "QuireRejections",
        "sum by (instance, reason) (rate(vllm:admission_rejections_total[5m])) > 0",
        "1m",
        "warning",
        "requests are refused because of {{ $labels.reason }}",
        "Add capacity, or raise the limit if a longer wait is better than a refusal.",
        {"vllm:admission_rejections_total" + _at('reason="max_num_queued_reqs"'): "0+6x30"},
        {"vllm:admission_rejections_total" + _at('reason="max_num_queued_reqs"'): "6x30"},
    ),
)
