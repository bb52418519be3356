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
        "The life of a request has five moments: it **arrives** at the API process, is **queued** "
        "in the core, is first **scheduled**, gets its **first token** and its **last token**. "
        "Time to first token (TTFT) is first token - arrival. Inter-token latency (ITL) is the "
        "time between two successive outputs: one value for each output after the first, so a "
        "step that accepts three draft tokens gives one value and not three. Time per output "
        "token (TPOT) is one value per request: (last token - first token) / (tokens - 1); a "
        "request of one token has none. Queue time is scheduled - queued, prefill time first "
        "token - scheduled, decode time last token - first token, inference time last token - "
        "scheduled. End-to-end latency is the end as the API process sees it - arrival, and "
        "includes aborted requests.\n\nAll times are in seconds on the monotonic clock, taken "
        "when the API process has the token: whatever a client measures beyond them is the "
        "network and its own scheduling. A preemption does not interrupt a phase: the time spent "
        "waiting again counts as decode (or prefill) time.",
    ),
    Section(
        "Queue",
        (
            "num_requests_(running|waiting)",
            "num_requests_waiting_by_reason",
            "num_preemptions",
            "num_requests_kv_fetch_by_stage",
            "admission_rejections",
            "quire:slow_readers",
            "engine_sleep_state",
        ),
        "The state after the last step. Running requests hold KV blocks and compute tokens in "
        "each step, of their prompt or output. Waiting requests hold no blocks: they have not "
        "been admitted yet, or were preempted. `capacity` is the ordinary queue; `deferred` are "
        "requests that wait for something other than room. quire never fetches KV from another "
        "engine, so those stages are 0.",
    ),
    Section(
        "Replaced engine cores",
        (
            "quire:spare_core_ready",
            "quire:core_recovery_seconds",
            "quire:core_recovery_part_seconds",
        ),
        "The histogram's count is the number of engine cores that died and were replaced. Its "
        "seconds are from the moment the death was noticed until every request that had output has "
        "more. The parts add up to it, but for what the API process does in between.",
    ),
    Section(
        "KV cache",
        ("kv_cache_usage_perc", "gpu_cache_usage_perc", "kv_block_.*"),
        "Usage is a number from 0 to 1, not a percentage: the blocks that requests hold, divided "
        "by all blocks. Cached blocks that no request holds count as free. So usage falls to 0 "
        "when the last request ends, although the next equal prompt still finds its prefix.\n\n"
        "The `kv_block_` histograms exist with `--kv-cache-metrics` and follow a share of the "
        "blocks (`--kv-cache-metrics-sample`). All three are recorded when the cached content of "
        "a block is evicted: how long it was cached since the block was allocated, how long since "
        "a request last held or found it, and the times between such uses. If idle times are "
        "short and reuse gaps are long, the cache is too small for prompts that come back.",
    ),
    Section(
        "Second KV tier",
        (
            "num_requests_swapped",
            "(kv_offload_)?cpu_cache_usage_perc",
            "kv_blocks_swapped_.*",
            "kv_swap_.*",
        ),
        "With `--swap-space`, preempted requests leave their KV here; without it these metrics "
        "stay 0, and a preempted request is computed again. The first two have the names of vLLM "
        "V0, the third the name that newer dashboards query. Usage counts blocks that must be "
        "kept; evicted prefixes, which are kept only while there is room, do not count.",
    ),
    Section(
        "Prefix cache",
        (
            "(gpu_|external_)?prefix_cache_(queries|hits|hit_rate)",
            "quire:prefix_cache_missed",
            "quire:kv_blocks_shed",
            "mm_cache_(queries|hits)",
        ),
        "Counted in tokens. Each admission looks up the whole prompt; hits are the tokens that "
        "need not be computed. The hit rate over any window is `rate(hits) / rate(queries)`; the "
        "gauge is the rate over recent lookups, for dashboards that query one. `missed` counts "
        "tokens that were cached, evicted and then looked up again: a pool of twice the size "
        "would still have had them. Prompts that are sent only once add nothing to it, however "
        "low their hit rate. `kv_blocks_shed` counts blocks given up because less than 64 MiB of "
        "the machine's or the container's memory were left; their pages go back to the system. "
        "`external` is for a cache outside the engine and `mm` for one of "
        "processed images; quire has neither, so both are 0.",
    ),
    Section(
        "Tokens",
        (
            "prompt_tokens(_by_source|_cached|_cached_by_source)?",
            "(generation_)?tokens",
            "iteration_tokens_total",
        ),
        "All prompt tokens of a request, cached ones included, are counted when its first token "
        "arrives; generated tokens are counted as they arrive. Of the cached tokens, `device` are "
        "those found in the KV cache, `host` and `disk` those copied back from the second tier. "
        "`iteration_tokens_total` is a histogram of the tokens computed per step, without cached "
        "ones; its name ends in `_total` because vLLM's does, so its series are "
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
        "it ends: a client that disconnects counts as `abort`. "
        "`request_max_num_generation_tokens` has one value per request. Buckets of token counts "
        "are 1, 2, 5, 10, ... up to the model's length.",
    ),
    Section(
        "Speculative decoding",
        ("spec_decode_.*",),
        "A draft of k tokens is verified in one step and gives between 1 and k + 1 tokens. "
        "Acceptance rate = accepted / drafted tokens; mean acceptance length = 1 + accepted "
        "tokens / drafts; system efficiency = (accepted tokens + drafts) / (draft tokens + "
        "drafts), the share of the tokens that perfect drafts would have given. The gauges cover "
        "the engine's whole life; for a window, use the counters. Without drafts all of these "
        "stay 0.",
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
        "share of time that each phase takes. The sum of the phases says how busy the core is; 1 "
        "means always.\n\n`cpu_wait_seconds` says whether the machine gives the engine enough "
        "CPU: it counts how long threads were ready to run while other work had the cores. "
        "`rate(quire:cpu_wait_seconds_total[1m])` near 0 means that the engine has the machine to "
        "itself. It includes throttling by a CPU quota, but not the time that a hypervisor takes: "
        "that is in `cpu_withheld_seconds`. Only Linux reports these; on other systems both have "
        "no sample.",
    ),
    Section(
        "Adapters and watermarks",
        ("lora_requests(_info)?", "watermark_requests"),
        "Dashboards query these names. quire serves no LoRA adapters and watermarks no text yet, "
        "so the metrics are announced but have no sample.",
    ),
    Section(
        "Self-checks",
        ("quire:integrity_failures", "quire:core_stalls"),
        "The scheduler checks its own books when it becomes idle and every 64 steps, about a "
        "millisecond at a time and in at most 0.2 % of the time. If they are wrong, they are made "
        "anew, requests go on with the same tokens, and the log holds what to report. Anything "
        "but 0 is a bug.",
    ),
    Section(
        "Traces",
        ("quire:trace_spans_dropped",),
        "Spans that the collector did not accept. Serving goes on without them; one warning says "
        "why.",
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
