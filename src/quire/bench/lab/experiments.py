"""The experiments, and their table. Each takes a `Lab` and gives a `LabReport`.

Sizes are such that all run on the model that ships within a minute or two, and are cut to the
context of a model that has less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from quire.bench.lab.kit import (
    Effect,
    Lab,
    LabReport,
    context_of,
    figures_of,
    median,
    ms,
)
from quire.bench.result import latencies
from quire.registry import Registry
from quire.sim.capacity import KVCapacity

Figures = Mapping[str, Mapping[str, list[float]]]

EXPERIMENTS: Final[Registry[Callable[[Lab], LabReport]]] = Registry(
    "experiment",
    {
        "batch": "quire.bench.lab.experiments:batch",
        "prefix": "quire.bench.lab.experiments:prefix",
        "chunk": "quire.bench.lab.experiments:chunk",
        "eager": "quire.bench.lab.start:eager",
        "kv-dtype": "quire.bench.lab.experiments:kv_dtype",
        "swap": "quire.bench.lab.experiments:swap",
        "priority": "quire.bench.lab.experiments:priority",
        "capacity": "quire.bench.lab.experiments:capacity",
    },
)
"""Experiments by name."""


def batch(lab: Lab) -> LabReport:
    """One prompt alone, and a hundred together."""
    sizes = {"1 prompt": 1, "100 prompts": 100}
    with lab.engines({"": {}}) as engines:
        llm = engines[""]
        found = lab.each_round(
            "batch", list(sizes), lambda name, _: figures_of(lab.run(llm, [64] * sizes[name], 32))
        )
    one, many = found["1 prompt"], found["100 prompts"]
    faster = Effect.of(many["tokens_per_second"], one["tokens_per_second"])
    slower = Effect.of(many["tpot"], one["tpot"])
    return LabReport(
        "batch",
        "What does continuous batching gain?",
        "64 tokens in and 32 out of each prompt, all at once.",
        ["", "steps", "output tokens/s", "TPOT, ms", "peak KV usage"],
        [
            [
                name, f"{median(row['steps']):.0f}", f"{median(row['tokens_per_second']):.0f}",
                ms(row["tpot"]), f"{median(row['peak_kv_usage']):.2%}",
            ]
            for name, row in found.items()
        ],
        f"{faster.sentence('With 100 prompts together, tokens per second', 'were', 'were only')}; "
        f"{slower.sentence('the time per token of each request', 'was', 'was')}.",
        dict(found),
    )  # fmt: skip


def prefix(lab: Lab) -> LabReport:
    """The same prompt ten times, with and without prefix caching."""
    variants = {
        "caching off": {"enable_prefix_caching": False},
        "caching on": {"enable_prefix_caching": True},
    }
    with lab.engines(variants) as engines:
        length = min(1024, context_of(engines["caching on"]) - 8)

        def measure(name: str, number: int) -> dict[str, float]:
            llm = engines[name]
            jobs = lab.jobs(lab.prompts(llm, [length], seed=number + 1), 2)
            ttfts = [lab.drive(llm, jobs).records[0].ttft for _ in range(10)]
            return {"first": ttfts[0], "later": float(np.mean(ttfts[1:]))}

        found = lab.each_round("prefix", list(variants), measure)
    effect = Effect.of(found["caching off"]["later"], found["caching on"]["later"])
    return LabReport(
        "prefix",
        "What does prefix caching gain?",
        f"A prompt of {length} tokens ten times in a row; a new one in every round.",
        ["", "TTFT of the first, ms", "mean TTFT of the other nine, ms"],
        [[name, ms(row["first"]), ms(row["later"])] for name, row in found.items()],
        effect.sentence(
            "Without caching, the TTFT of a prompt that was seen before",
            "was",
            "was only",
            "that with caching",
        )
        + ".",
        dict(found),
    )


def chunk(lab: Lab) -> LabReport:
    """Budgets of a step while long prompts come in beside running requests."""
    budgets = (1024, 4096, 16384)
    variants = {str(b): {"max_num_batched_tokens": b, "max_num_seqs": 64} for b in budgets}
    with lab.engines(variants) as engines:
        length = min(1500, context_of(engines["1024"]) - 8)

        def measure(name: str, number: int) -> dict[str, float]:
            llm = engines[name]
            running = lab.jobs(lab.prompts(llm, [16] * 8), 100)
            outcome = lab.drive(llm, running + lab.jobs(lab.prompts(llm, [length] * 12), 4))
            gaps = latencies(outcome.records[:8])["itl"]
            prompts = latencies(outcome.records[8:])["ttft"]
            return {
                "median_itl": float(np.median(gaps)),
                "longest_itl": float(gaps.max()),
                "ttft": float(prompts.mean()),
                "seconds": outcome.duration,
                "prompt_steps": float(sum(step.num_prompt_tokens > 0 for step in outcome.steps)),
            }

        found = lab.each_round("chunk", list(variants), measure)
    small, large = found["1024"], found["16384"]
    longest = Effect.of(large["longest_itl"], small["longest_itl"])
    prompts = Effect.of(large["ttft"], small["ttft"])
    total = Effect.of(large["seconds"], small["seconds"])
    return LabReport(
        "chunk",
        "What does the token budget of a step (`--max-num-batched-tokens`) trade?",
        f"8 requests generate 100 tokens each, and 12 prompts of {length} tokens come with them.",
        ["budget", "median ITL, ms", "longest ITL, ms", "TTFT of the prompts, ms", "total, s"],
        [
            [
                name, ms(row["median_itl"]), ms(row["longest_itl"]), ms(row["ttft"]),
                f"{median(row['seconds']):.3f}",
            ]
            for name, row in found.items()
        ],
        f"With 16384 instead of 1024, {longest.sentence('the longest ITL', 'was', 'was only')}; "
        f"{prompts.sentence('the TTFT of the prompts', 'was', 'was only')}; "
        f"{total.sentence('the whole run', 'took', 'took only')}.",
        dict(found),
    )  # fmt: skip


def kv_dtype(lab: Lab) -> LabReport:
    """Types of keys and values: tokens that fit, speed, agreement."""
    variants: dict[str, dict[str, Any]] = {
        name: {"kv_cache_dtype": name} for name in ("auto", "fp8", "int8_per_token_head")
    }
    with lab.engines(variants) as engines:
        length = min(1024, context_of(engines["auto"]) - 40)
        tokens = {name: llm.llm_engine.core.kv.capacity_tokens for name, llm in engines.items()}
        said: dict[str, list[list[int]]] = {}

        def measure(name: str, number: int) -> dict[str, float]:
            llm = engines[name]
            jobs = lab.jobs(lab.prompts(llm, [length] * 8, seed=number + 1), 32)
            outcome = lab.drive(llm, jobs)
            said.setdefault(name, []).extend(outcome.token_ids)
            return figures_of(outcome)

        found = lab.each_round("kv-dtype", list(variants), measure)
    same = {name: _agreement(said["auto"], said[name]) for name in variants}
    faster = Effect.of(found["auto"]["tpot"], found["fp8"]["tpot"])
    room = tokens["fp8"] / tokens["auto"]
    return LabReport(
        "kv-dtype",
        "What does a smaller type for keys and values (`--kv-cache-dtype`) gain, and cost?",
        f"8 prompts of {length} tokens, 32 tokens out of each, greedy; equal bytes of KV cache.",
        ["type", "KV tokens", "TPOT, ms", "tokens before a difference"],
        [
            [name, f"{tokens[name]:,}", ms(row["tpot"]), f"{same[name]:.1%}"]
            for name, row in found.items()
        ],
        f"fp8 holds {room:.2f} times the tokens in the same bytes; with auto, "
        f"{faster.sentence('the time per token', 'was', 'was only', 'that with fp8')}; "
        f"{same['fp8']:.1%} of the tokens came before the first that differs.",
        {name: {**row, "kv_tokens": tokens[name]} for name, row in found.items()},
    )


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of the tokens before the first that differs, of all tokens. After a difference, texts
    go different ways, so later tokens say nothing."""
    alike = total = 0
    for a, b in zip(ours, theirs, strict=True):
        differ = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        alike += differ[0] if differ else len(a)
        total += len(a)
    return alike / max(1, total)


def swap(lab: Lab) -> LabReport:
    """More requests than the KV cache holds: drop and compute again, or swap out."""
    length, blocks = 256, 256
    small = {"num_gpu_blocks_override": blocks, "max_model_len": 768, "block_size": 16}
    small["enable_prefix_caching"] = False
    variants: dict[str, dict[str, Any]] = {
        "recompute": {**small, "swap_space": 0},
        "swap": {**small, "swap_space": 0.5, "preemption_mode": "swap"},
        "auto": {**small, "swap_space": 0.5, "preemption_mode": "auto"},
    }
    with lab.engines(variants) as engines:
        held = KVCapacity(engines["swap"].llm_engine.core.kv.capacity_tokens, 2 * length)

        def measure(name: str, number: int) -> dict[str, float]:
            outcome = lab.run(engines[name], [length] * 2 * held.maximum, length)
            computed = sum(step.num_prompt_tokens for step in outcome.steps)
            return {
                **figures_of(outcome),
                "prompt_tokens": float(computed),
                "swapped_in": float(sum(step.num_blocks_swapped_in for step in outcome.steps)),
            }

        found = lab.each_round("swap", list(variants), measure)
    effect = Effect.of(found["recompute"]["seconds"], found["swap"]["seconds"])
    return LabReport(
        "swap",
        "Is it cheaper to swap a preempted request out, or to compute it again?",
        f"{2 * held.maximum} requests of {length} + {length} tokens where {held.maximum} fit.",
        ["", "total, s", "preemptions", "prompt tokens computed", "blocks swapped in"],
        [
            [
                name, f"{median(row['seconds']):.3f}", f"{median(row['preemptions']):.0f}",
                f"{median(row['prompt_tokens']):,.0f}", f"{median(row['swapped_in']):,.0f}",
            ]
            for name, row in found.items()
        ],
        effect.sentence(
            "The run with recomputation", "took", "took only", "the time of the one with swapping"
        )
        + ".",
        dict(found),
    )  # fmt: skip


def priority(lab: Lab) -> LabReport:
    """Urgent requests among others, with and without the policy that knows them."""
    shared = {"max_num_seqs": 8}
    variants: dict[str, dict[str, Any]] = {
        name: {**shared, "scheduling_policy": name} for name in ("fcfs", "priority")
    }
    num, every = 64, 8
    with lab.engines(variants) as engines:

        def measure(name: str, number: int) -> dict[str, float]:
            llm = engines[name]
            jobs = lab.jobs(lab.prompts(llm, [64] * num), 32)
            for job in jobs[every - 1 :: every]:
                job.priority = -1
            outcome = lab.drive(llm, jobs)
            pairs = list(zip(jobs, outcome.records, strict=True))
            return {
                "urgent": float(np.mean([r.ttft for j, r in pairs if j.priority])),
                "others": float(np.mean([r.ttft for j, r in pairs if not j.priority])),
                "seconds": outcome.duration,
            }

        found = lab.each_round("priority", list(variants), measure)
    urgent = Effect.of(found["fcfs"]["urgent"], found["priority"]["urgent"])
    of_urgent = "Under fcfs, the TTFT of urgent requests"
    others = Effect.of(found["priority"]["others"], found["fcfs"]["others"])
    return LabReport(
        "priority",
        "What do urgent requests gain from `--scheduling-policy priority`, and what do others pay?",
        f"{num} requests of 64 + 32 tokens at once, 8 run at a time, every eighth is urgent.",
        ["policy", "TTFT of urgent ones, ms", "TTFT of the others, ms", "total, s"],
        [
            [name, ms(row["urgent"]), ms(row["others"]), f"{median(row['seconds']):.3f}"]
            for name, row in found.items()
        ],
        f"{urgent.sentence(of_urgent, 'was', 'was only', 'that under priority')}; "
        f"{others.sentence('the TTFT of the others', 'was', 'was only')}.",
        dict(found),
    )


def capacity(lab: Lab) -> LabReport:
    """The usual formula for the concurrency, tried out."""
    low, high = 64, 192
    mean = (low + high) // 2 + 64
    own = {"num_gpu_blocks_override": 385, "block_size": 16, "max_model_len": 768}
    own["enable_prefix_caching"] = False
    with lab.engines({"": own}) as engines:
        llm = engines[""]
        held = KVCapacity(llm.llm_engine.core.kv.capacity_tokens, mean)
        sizes = {
            "recommended": held.recommended,
            "maximum": held.maximum,
            "half as many again": held.maximum * 3 // 2,
        }

        def measure(name: str, number: int) -> dict[str, float]:
            lengths = [int(n) for n in lab.rng.integers(low, high + 1, sizes[name])]
            return figures_of(lab.run(llm, lengths, 64))

        found = lab.each_round("capacity", list(sizes), measure)
    worst = {name: max(row["preemptions"]) for name, row in found.items()}
    held_up = worst["recommended"] == 0
    return LabReport(
        "capacity",
        "Does the formula `KV tokens / mean tokens per request`, less 30 %, hold?",
        f"{held.formula()}. Prompts of {low} to {high} tokens, 64 out of each.",
        ["requests at once", "number", "peak KV usage", "preemptions", "output tokens/s"],
        [
            [
                name, str(sizes[name]), f"{median(row['peak_kv_usage']):.0%}",
                f"{median(row['preemptions']):.0f}", f"{median(row['tokens_per_second']):.0f}",
            ]
            for name, row in found.items()
        ],
        f"At the recommended {held.recommended} requests "
        + ("none was preempted" if held_up else f"up to {worst['recommended']:.0f} were preempted")
        + f" in {lab.rounds} rounds; at the maximum up to {worst['maximum']:.0f}, and with half as "
        f"many again up to {worst['half as many again']:.0f}.",
        dict(found),
    )  # fmt: skip
