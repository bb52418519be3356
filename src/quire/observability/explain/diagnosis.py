"""The on-call drill as a table: symptom, likely cause, evidence, and the flag to change.

Each row of `DRILL` stands for one rule from runbooks for vLLM: what to check when first tokens are
late, when output stutters, when the cache is full, when nothing moves. `weigh` returns the share of
time, 0 to 1, that a cause costs. Below a threshold a row reports nothing, so a healthy server has
no findings. The figures come from `record_signals.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from quire.observability.explain.record_signals import Signals
from quire.observability.explain.wording import plural, seconds

NOTABLE: Final = 0.05
"""A cause that costs at least this share of the time is a finding."""
BURST: Final = 0.1
"""Share of the time for which the queue may stand still without being a symptom."""
MIN_SPIKES: Final = 3
SMOOTH: Final = 0.05
"""Seconds between tokens up to which output reads smoothly: twenty tokens a second."""
STARVED: Final = 0.2
"""Share of the time that threads may wait for a core. It is not small, because with as many threads
as cores the API process and the steps take turns."""
FULL: Final = 0.9
"""KV cache usage above which more requests at once would be preempted."""
MIN_STEPS: Final = 20
"""With fewer steps than this, shares mean nothing."""


Limits = dict[str, int | str]


class Finding(msgspec.Struct):
    """A likely cause."""

    name: str
    symptom: str
    cause: str
    evidence: str
    remedy: str
    weight: float
    """How much it matters, 0 to 1: roughly the share of time it costs."""
    limits: Limits
    """What to try without a restart: a body for `POST /limits`, empty if there is nothing."""


@dataclass(frozen=True, slots=True)
class DrillRow:
    """One entry of the drill."""

    name: str
    symptom: str
    cause: str
    weigh: Callable[[Signals], float]
    evidence: Callable[[Signals], str]
    remedy: Callable[[Signals], str]
    needs: tuple[str, ...] = ()
    """Signals that the row needs; without them it is skipped."""
    limits: Callable[[Signals], Limits] = lambda s: {}
    """Limits that would help and can be changed while the server runs."""


def _wait(reason: str) -> Callable[[Signals], float]:
    """Share of the time in which the queue stood still for this reason. Short bursts are normal and
    count as 0."""

    def weigh(s: Signals) -> float:
        share = float(s["wait_share"].get(reason, 0.0))
        return share if share >= BURST else 0.0

    return weigh


def _pool_too_small(s: Signals) -> float:
    waits = _wait("blocks")(s) + _wait("preemption")(s)
    thrash = min(1.0, s["recomputed_share"]) + (0.2 if s["preemption_rate"] > 0.5 else 0.0)
    return min(1.0, waits + thrash) if s["kv_usage_max"] > 0.8 else 0.0


def _spikes(s: Signals) -> float:
    """Spikes count if they account for most of what is slow, and if they show in p99."""
    if s.get("spikes", 0) < MIN_SPIKES or s["spikes_by_prefill"] < 0.5:
        return 0.0
    if s["itl_p99"] < _smooth(s):
        return 0.0
    if s["spike_prompt_tokens"] <= 2 * s["max_num_seqs"]:
        return 0.0  # not long: what this row would change changes nothing
    return max(NOTABLE, float(s["spike_time_share"]))


def _smooth(s: Signals) -> float:
    """Seconds between tokens up to which output does not stutter."""
    return max(SMOOTH, 3 * float(s["decode_step_p50"]))


def _smaller_budget(s: Signals) -> int:
    """A token budget under which output would not stutter, given what a prompt token has cost. A
    fifth is to spare, so that whoever follows the advice does not get the same advice again. Each
    running request needs one token."""
    had = min(int(s["max_num_batched_tokens"]), int(s["spike_prompt_tokens"]))
    room = 0.8 * (_smooth(s) - s["decode_step_p50"])
    fits = min(had // 2, int(room / s["spike_seconds_per_token"]))
    return max(int(s["max_num_seqs"]), fits // 16 * 16)


def _misses(s: Signals) -> float:
    """Share of tokens that were computed again because they had been evicted. Evicting a prompt
    that is never sent again costs nothing, so evictions alone do not count."""
    return min(1.0, float(s["missed_share"])) if s["prefix_queries"] > 1000 else 0.0


def _starved(s: Signals) -> float:
    share = max(float(s.get(f"{what}_share", 0.0)) for what in ("core_wait", "api_wait", "stolen"))
    return min(1.0, share) if share >= STARVED else 0.0


def _starved_evidence(s: Signals) -> str:
    waits = [("threads of the engine's steps", s["core_wait_seconds"])]
    if "api_wait_seconds" in s:
        waits.append(("the API process", s["api_wait_seconds"]))
    (who, longest), *others = sorted(waits, key=lambda wait: -wait[1])
    work = seconds(s["span_seconds"])
    parts = [f"{who} waited {seconds(longest)} of the last {work} of work for a core"]
    parts += [f"{name} waited {seconds(waited)}" for name, waited in others if waited >= 0.01]
    if "load" in s:
        parts.append(f"load {s['load']:.1f} on {plural(s['cores'], 'core')}")
    if s.get("throttled_seconds", 0.0) > 0:
        parts.append(
            f"the control group was throttled {seconds(s['throttled_seconds'])} of "
            f"{seconds(s['machine_seconds'])} by its CPU quota"
        )
    if s.get("stolen_share", 0.0) >= 0.01:
        parts.append(f"the hypervisor took {_percent(s['stolen_share'])} of the cores' time")
    return "; ".join(parts)


def _starved_remedy(s: Signals) -> str:
    if s.get("throttled_seconds", 0.0) > 0.05 * s.get("machine_seconds", math.inf):
        return (
            "a larger CPU quota (the container's CPU limit, cpu.max), or fewer threads: "
            f"OMP_NUM_THREADS (cores of the quota: {s['cores']})"
        )
    return (
        "take the other work off this machine, or give the server cores of its own (taskset, a "
        "cpuset, CPU requests of its container); with more threads than cores: OMP_NUM_THREADS"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _pool_evidence(s: Signals) -> str:
    return (
        f"KV cache usage up to {_percent(s['kv_usage_max'])}, {s['preemptions']} preemptions "
        f"({s['preemption_rate']:.1f}/s), {_percent(s['recomputed_share'])} of all computed tokens "
        f"were computed again; {_percent(_wait('blocks')(s))} of the time requests waited for KV "
        f"blocks (up to {s['waiting_max']} at once)"
    )


def _queue_evidence(s: Signals, reason: str) -> str:
    late = f"; p95 time in the queue {seconds(s['queue_p95'])}" if "queue_p95" in s else ""
    return (
        f"{_percent(_wait(reason)(s))} of the time requests waited {_FOR[reason]}, "
        f"{s['waiting_mean']:.1f} on average (up to {s['waiting_max']} at once){late}"
    )


_FOR: Final = {
    "max_num_seqs": "for a free place",
    "budget": "for tokens of a step's budget",
    "policy": "although there was room",
}
"""What the queue waited for, in words, by the name of the `Wait`."""


def _spike_evidence(s: Signals) -> str:
    return (
        f"p99 time between tokens is {seconds(s['itl_p99'])}, while a step that only decodes takes "
        f"{seconds(s['decode_step_p50'])}; {s['spikes']} slow steps that computed prompts make up "
        f"{_percent(s['spikes_by_prefill'])} of the difference: the slowest took "
        f"{seconds(s['spike_seconds'])} with {s['spike_prompt_tokens']:,} prompt tokens, mostly of "
        f"{s['spike_request']}"
    )


def _as_many_as_ran(s: Signals) -> Limits:
    return {"max_num_seqs": min(s["max_num_seqs"], max(1, round(s["running_mean"])))}


def _pool_remedy(s: Signals) -> str:
    set_by_hand = s.get("num_gpu_blocks_override")
    more = (
        f"a larger --num-gpu-blocks-override (now {set_by_hand}), or none"
        if set_by_hand
        else "more KV memory (--gpu-memory-utilization, --kv-cache-memory-bytes)"
    )
    fewer = _as_many_as_ran(s)["max_num_seqs"]
    return (
        f"{more}; or fewer requests at once: --max-num-seqs (now {s['max_num_seqs']}; {fewer} ran "
        "on average); or --watermark against preemption, a lower --max-model-len, another replica"
    )


def _spike_remedy(s: Signals) -> str:
    if not s.get("enable_chunked_prefill", True):
        return "--enable-chunked-prefill: long prompts are computed in pieces"
    budget = _smaller_budget(s)
    return (
        f"lower --max-num-batched-tokens (now {s['max_num_batched_tokens']}; try {budget}) or set "
        f"--long-prefill-token-threshold (now {s['long_prefill_token_threshold'] or 'off'})"
    )


def _spike_limits(s: Signals) -> Limits:
    chunked = s.get("enable_chunked_prefill", True)
    return {"max_num_batched_tokens": _smaller_budget(s)} if chunked else {}


def _seats_remedy(s: Signals) -> str:
    if s["kv_usage_max"] > FULL:
        return (
            f"more KV memory or another replica: with KV cache usage up to "
            f"{_percent(s['kv_usage_max'])}, more --max-num-seqs (now {s['max_num_seqs']}) would "
            "be preempted"
        )
    return (
        f"--max-num-seqs (now {s['max_num_seqs']}), for KV cache usage is at most "
        f"{_percent(s['kv_usage_max'])}; else another replica"
    )


def _twice_the_seats(s: Signals) -> Limits:
    if s["kv_usage_max"] > FULL:
        return {}
    return {"max_num_seqs": min(2 * s["max_num_seqs"], s["max_num_batched_tokens"])}


def _budget_remedy(s: Signals) -> str:
    return (
        f"--max-num-batched-tokens (now {s['max_num_batched_tokens']}): more tokens per step, "
        "with longer steps; --scheduling-policy sjf or --long-prefill-token-threshold lets "
        "short prompts pass long ones; else another replica"
    )


DRILL: Final = (
    DrillRow(
        "machine_starved",
        "everything is slow now and then, whatever the requests are",
        "the machine is starved: other work has the cores that the engine needs",
        _starved,
        _starved_evidence,
        _starved_remedy,
        needs=("core_wait_seconds",),
    ),
    DrillRow(
        "kv_pool_too_small",
        "first tokens are late, requests are preempted, KV cache usage near 100 %",
        "the KV cache is too small for the requests that run at once",
        _pool_too_small,
        _pool_evidence,
        _pool_remedy,
        limits=_as_many_as_ran,
    ),
    DrillRow(
        "long_prefills_stall_decodes",
        "p99 time between tokens spikes while its median is fine",
        "long prompts share steps with decodes",
        _spikes,
        _spike_evidence,
        _spike_remedy,
        needs=("itl_p99",),
        limits=_spike_limits,
    ),
    DrillRow(
        "too_few_seats",
        "first tokens are late, time between tokens is fine, as many run as --max-num-seqs allows",
        "all --max-num-seqs places are taken",
        _wait("max_num_seqs"),
        lambda s: _queue_evidence(s, "max_num_seqs"),
        _seats_remedy,
        limits=_twice_the_seats,
    ),
    DrillRow(
        "budget_used_up_by_prompts",
        "first tokens are late although there are free places and KV blocks",
        "prompts use up the token budget of each step (--max-num-batched-tokens)",
        _wait("budget"),
        lambda s: _queue_evidence(s, "budget"),
        _budget_remedy,
        limits=lambda s: {"max_num_batched_tokens": 2 * s["max_num_batched_tokens"]},
    ),
    DrillRow(
        "held_back_by_policy",
        "requests wait although there is room",
        "--scheduling-policy or --scheduler-delay-factor holds them back",
        _wait("policy"),
        lambda s: _queue_evidence(s, "policy"),
        lambda s: f"--scheduler-delay-factor, --scheduling-policy (now {s['scheduling_policy']})",
        limits=lambda s: {"scheduling_policy": "fcfs"},
    ),
    DrillRow(
        "prefixes_evicted",
        "prompts that were cached are computed again",
        "cached prefixes are evicted before they are asked for again",
        _misses,
        lambda s: (
            f"{s['missed_tokens']:,} prompt tokens ({_percent(s['missed_share'])} of all computed "
            f"tokens) had been cached and were evicted; hit rate {_percent(s['prefix_hit_rate'])}, "
            f"{s['blocks_evicted']:,} blocks evicted"
        ),
        lambda s: (
            "more KV memory (--gpu-memory-utilization, --kv-cache-memory-bytes), or --swap-space, "
            "which keeps what is evicted"
        ),
    ),
    DrillRow(
        "scheduler_bound",
        "the processor is busy, steps are short, throughput is low",
        "scheduling and bookkeeping take a large part of each step",
        lambda s: s["overhead_share"] if s["overhead_share"] > 0.3 else 0.0,
        lambda s: f"{_percent(s['overhead_share'])} of the time of steps is not the model's",
        lambda s: "larger batches make its share smaller; quire timeline shows each phase",
    ),
    DrillRow(
        "clients_give_up",
        "requests end with finish_reason abort",
        "callers leave before the end: timeouts, or cancelled generations",
        lambda s: s["aborted"] / s["finished"] if s["aborted"] >= 3 else 0.0,
        lambda s: f"{s['aborted']} of {s['finished']} requests were aborted",
        lambda s: "the callers' timeouts, and what makes them wait (the other findings)",
    ),
    DrillRow(
        "requests_fail",
        "requests end with finish_reason error",
        "steps fail for some requests",
        lambda s: s["failed"] / s["finished"] if s["failed"] else 0.0,
        lambda s: f"{s['failed']} of {s['finished']} requests failed",
        lambda s: "the log of the engine core names each request and its error",
    ),
    DrillRow(
        "drafts_rejected",
        "speculative decoding does not make it faster",
        "most draft tokens are rejected",
        lambda s: NOTABLE if s["draft_acceptance"] < 0.3 else 0.0,
        lambda s: f"{_percent(s['draft_acceptance'])} of the draft tokens were accepted",
        lambda s: "fewer draft tokens, another draft model, or no speculation",
        needs=("draft_acceptance",),
    ),
)
"""The rows, in the order in which causes of equal weight are reported."""


def diagnose(signals: Signals) -> list[Finding]:
    """The causes that the figures point to, the weightiest first. An empty list means healthy."""
    if signals.get("steps", 0) < MIN_STEPS:
        return []
    found = []
    for row in DRILL:
        if all(name in signals for name in row.needs):
            weight = row.weigh(signals)
            if weight >= NOTABLE:
                found.append(_finding(row, signals, weight))
    return sorted(found, key=lambda finding: -finding.weight)


def _finding(row: DrillRow, signals: Signals, weight: float) -> Finding:
    limits = {name: v for name, v in row.limits(signals).items() if signals[name] != v}
    remedy = row.remedy(signals)
    if limits:
        remedy += f"; without a restart: POST /limits {json.dumps(limits)}"
    return Finding(row.name, row.symptom, row.cause, row.evidence(signals), remedy, weight, limits)
