"""The block of text that a run ends with: line for line that of `vllm bench serve`, 50 wide."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from quire.bench.result import LATENCIES, percentile_name

WIDTH: Final = 50


def row(name: str, value: float | int | str) -> str:
    """One line: numbers that are not whole have two decimals."""
    shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
    return f"{name:<40} {shown}"


def heading(text: str, mark: str = "-") -> str:
    """A line with a title in its middle."""
    return f"{text:{mark}^{WIDTH}}"


def text_block(
    result: Mapping[str, Any],
    *,
    metrics: Sequence[str] = ("ttft", "tpot", "itl"),
    percentiles: Sequence[float] = (99,),
    title: str = " Serving Benchmark Result ",
) -> str:
    """The text of a result.

    Args:
        result: Keys as `result.summary` and `RunSettings.to_json` give them.
        metrics: Which latencies have a section, if there are samples in the result.
        percentiles: Which ones of them.
        title: Of the block.
    """
    lines = [heading(title, "="), *_totals(result)]
    for name in metrics:
        if f"mean_{name}_ms" in result:
            lines += _section(result, name, percentiles)
    lines += _speculation(result.get("spec_decode"))
    return "\n".join([*lines, "=" * WIDTH])


def _totals(result: Mapping[str, Any]) -> list[str]:
    lines = [row("Successful requests:", result["completed"])]
    lines.append(row("Failed requests:", result["failed"]))
    if result.get("max_concurrency") is not None:
        lines.append(row("Maximum request concurrency:", result["max_concurrency"]))
    rate = float(result.get("request_rate", "inf"))
    if not math.isinf(rate):
        lines.append(row("Request rate configured (RPS):", rate))
    lines.append(row("Benchmark duration (s):", float(result["duration"])))
    lines.append(row("Total input tokens:", result["total_input_tokens"]))
    lines.append(row("Total generated tokens:", result["total_output_tokens"]))
    lines.append(row("Request throughput (req/s):", float(result["request_throughput"])))
    if result.get("request_goodput") is not None:
        lines.append(row("Request goodput (req/s):", float(result["request_goodput"])))
    for text, key in (
        ("Input token throughput (tok/s):", "input_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
    ):
        if key in result:
            lines.append(row(text, float(result[key])))
    lines.append(row("Peak concurrent requests:", float(result["max_concurrent_requests"])))
    lines.append(row("Total token throughput (tok/s):", float(result["total_token_throughput"])))
    return lines


def _section(result: Mapping[str, Any], name: str, percentiles: Sequence[float]) -> list[str]:
    title, short = LATENCIES[name]
    lines = [heading(title)]
    kinds = [("mean", "Mean"), ("median", "Median")]
    kinds += [(percentile_name(p), percentile_name(p).upper()) for p in percentiles]
    for key, shown in kinds:
        lines.append(row(f"{shown} {short} (ms):", float(result[f"{key}_{name}_ms"])))
    return lines


def _speculation(figures: Mapping[str, Any] | None) -> list[str]:
    if not figures:
        return []
    lines = [heading("Speculative Decoding")]
    lines.append(row("Acceptance rate (%):", float(figures["acceptance_rate"])))
    lines.append(row("Acceptance length:", float(figures["acceptance_length"])))
    lines.append(row("Drafts:", figures["num_drafts"]))
    lines.append(row("Draft tokens:", figures["draft_tokens"]))
    lines.append(row("Accepted tokens:", figures["accepted_tokens"]))
    if rates := figures["per_position_acceptance_rates"]:
        lines.append("Per-position acceptance (%):")
        lines += [row(f"  Position {i}:", 100.0 * rate) for i, rate in enumerate(rates)]
    return lines
