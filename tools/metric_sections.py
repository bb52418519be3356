"""The metrics in groups, with what one has to know to read them: for docs/metrics.md and deploy/.

A metric belongs to the first section with a pattern that fits its whole name (without `vllm:`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.observability.metrics.table import METRICS, Metric, MetricKind


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    patterns: tuple[str, ...]
    prose: str


SECTIONS = (
    Section(
        "Latency",
        (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "time_per_output_token_seconds",
            "request_time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "request_(queue|prefill|decode|inference)_time_seconds",
            "time_in_queue_requests",
        ),
        "The life of a request has five moments: it **arrives** at the API process, is "
        "**queued** in the core, is first **scheduled**, gets its **first token** and its "
        "**last token**. Time to first token (TTFT) is first token - arrival. Inter-token "
        "latency (ITL) is the time between two successive outputs: one value for each output "
        "after the first, so a step that confirms three draft tokens gives one value and not "
        "three. Time per output token (TPOT) is one value per request: (last token - first "
        "token) / (tokens - 1); a request of one token has none. Queue time is scheduled - "
        "queued, prefill time first token - scheduled, decode time last token - first token, "
        "inference time last token - scheduled. End to end is the end as the API process sees "
        "it - arrival, and counts aborted requests too.\n\n"
        "All times are from the monotonic clock, in seconds, taken when the API process has the "
        "token: what a client measures beyond them is the network and its own scheduling. After "
        "a preemption the phases go on: time spent waiting again is part of decode (or prefill) "
        "time.",
    ),
    Section(
        "Queue",
        (
            "num_requests_(running|waiting)",
            "num_requests_waiting_by_reason",
            "num_preemptions",
            "num_requests_kv_fetch_by_stage",
            "admission_rejections",
            "engine_sleep_state",
        ),
        "State after the last step. Running requests hold KV blocks and get tokens in each "
        "step, prompts as well as decodes; waiting ones hold none, or lost theirs to a "
        "preemption. `capacity` is the ordinary queue, `deferred` waits for something other "
        "than room. KV is never fetched from another engine, so those stages are 0.",
    ),
    Section(
        "KV cache",
        ("kv_cache_usage_perc", "gpu_cache_usage_perc", "kv_block_.*"),
        "Usage is 0 to 1, not percent: blocks that some request holds, by all blocks. Cached "
        "blocks that nobody holds are free, so usage falls to 0 when the last request ends "
        "although the next equal prompt still finds its prefix.\n\n"
        "The `kv_block_` histograms are there with `--kv-cache-metrics` and follow a share of the "
        "blocks (`--kv-cache-metrics-sample`). All three are told when the cached content of a "
        "block is given up for new tokens: how long it stayed since the block was taken, how long "
        "since anybody held or found it, and the gaps between the times that it was taken or "
        "found. Idle times that are short, with gaps that are long: the cache is too small for "
        "what comes back.",
    ),
    Section(
        "Second KV tier",
        (
            "num_requests_swapped",
            "(kv_offload_)?cpu_cache_usage_perc",
            "kv_blocks_swapped_.*",
            "kv_swap_.*",
        ),
        "Where preempted requests leave their KV if `--swap-space` gives it room; without it these "
        "stay 0, and a preempted request is computed again. The first two have the names of "
        "vLLM V0, the third is what newer dashboards ask for. Usage counts blocks that must not "
        "be given up: prefixes that are merely kept do not count.",
    ),
    Section(
        "Prefix cache",
        (
            "(gpu_|external_)?prefix_cache_(queries|hits|hit_rate)",
            "quire:prefix_cache_missed",
            "mm_cache_(queries|hits)",
        ),
        "Counted in tokens. Each admission looks up the whole prompt; hits are the tokens it "
        "need not compute. The hit rate over any window is `rate(hits) / rate(queries)`; the "
        "gauge is that of the lookups of late, for dashboards that ask for one. `missed` are "
        "tokens that had been cached, were evicted and were then asked for again: what a pool "
        "of twice the size would still have had. Prompts that nobody sends twice miss nothing, "
        "however low their hit rate. `external` "
        "would be a cache outside this engine and `mm` one of processed images; there is "
        "neither, so they are 0.",
    ),
    Section(
        "Tokens",
        (
            "prompt_tokens(_by_source|_cached|_cached_by_source)?",
            "(generation_)?tokens",
            "iteration_tokens_total",
        ),
        "Prompt tokens are counted whole when a request's first token arrives, cached ones "
        "included; generated ones when they arrive. Of the cached ones, `device` are those found "
        "in the KV cache, `host` and `disk` those brought back from the second tier. "
        "`iteration_tokens_total` is a histogram of tokens computed per step, cached ones "
        "excluded; its name ends in `_total` by tradition, so its series are "
        "`vllm:iteration_tokens_total_bucket` and so on.",
    ),
    Section(
        "Requests",
        (
            "request_success",
            "corrupted_requests",
            "request_(prompt|generation|max_num_generation|prefill_kv_computed)_tokens",
            "request_params_(n|max_tokens)",
            "request_num_preemptions",
        ),
        "One value per completion (`n` of them in a request with `n` > 1) when it ends, however "
        "it ends: a client that goes away counts as `abort`. "
        "`request_max_num_generation_tokens` has one value per request. Buckets of token counts "
        "are 1, 2, 5, 10, ... up to the model's length.",
    ),
    Section(
        "Speculative decoding",
        ("spec_decode_.*",),
        "A draft of k tokens is verified in one step and gives between 1 and k + 1 tokens. "
        "Acceptance rate = accepted / drafted tokens; mean acceptance length = 1 + accepted "
        "tokens / drafts; system efficiency = (accepted tokens + drafts) / (draft tokens + "
        "drafts), the share of what perfect drafts would have given. The gauges are over the "
        "engine's whole life; over a window, take the counters. All stay 0 without drafts.",
    ),
    Section(
        "Engine",
        (
            "engine_steps",
            "engine_step_seconds",
            "model_(forward|execute)_time_milliseconds",
            "quire:cpu_(wait|withheld)_seconds",
        ),
        "Where the engine's own time goes. `rate(vllm:engine_step_seconds_total[1m])` is the "
        "share of a second that each part takes: their sum is how busy the core is, 1 being "
        "always.\n\n"
        "`cpu_wait_seconds` says whether the machine lets it: how long threads were ready to run "
        "while something else had the cores. `rate(quire:cpu_wait_seconds_total[1m])` near 0 is a "
        "machine of one's own. It counts throttling by a CPU quota too, but not what a hypervisor "
        "takes: that is `cpu_withheld_seconds`. Both are told by Linux alone; elsewhere they have "
        "no sample.",
    ),
    Section(
        "Adapters and watermarks",
        ("lora_requests(_info)?", "watermark_requests"),
        "Names that dashboards ask for. No LoRA adapter is served and no text watermarked yet, so "
        "they are announced and have no sample.",
    ),
    Section(
        "Traces",
        ("quire:trace_spans_dropped",),
        "Spans that no collector took. Serving goes on without them; one warning says why.",
    ),
)


def section_of(metric: Metric) -> Section:
    """The section a metric belongs to.

    Raises:
        LookupError: none has a pattern for it.
    """
    name = metric.name.removeprefix("vllm:")
    for section in SECTIONS:
        if any(re.fullmatch(pattern, name) for pattern in section.patterns):
            return section
    raise LookupError(f"{metric.name}: add it to a section of tools/metric_sections.py")


def grouped() -> list[tuple[Section, list[Metric]]]:
    """Sections that have metrics, each with its metrics in the order of the table."""
    members: dict[str, list[Metric]] = {section.title: [] for section in SECTIONS}
    for metric in METRICS:
        members[section_of(metric).title].append(metric)
    return [(section, members[section.title]) for section in SECTIONS if members[section.title]]


def series(metric: Metric) -> str:
    """The name a query asks for: counters end in `_total`."""
    counts = metric.kind in (MetricKind.COUNTER, MetricKind.VECTOR)
    return f"{metric.name}_total" if counts else metric.name


def series_names() -> dict[str, frozenset[str]]:
    """Every name that can be asked for, with its labels beyond the two that all have."""
    names: dict[str, frozenset[str]] = {}
    for metric in METRICS:
        labels = frozenset([metric.label] if metric.label else [])
        if metric.kind is MetricKind.HISTOGRAM:
            names[f"{metric.name}_bucket"] = labels | {"le"}
            names[f"{metric.name}_sum"] = names[f"{metric.name}_count"] = labels
        else:
            names[series(metric)] = labels
    return names
