"""The tables of docs/cpu-kernels.md from what the benchmarks wrote.

    python benchmarks/table.py benchmarks/results/*.json

Reads the output of `cpu_engine.py --json` and of `cpu_kernels.py --json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def engine_table(report: dict) -> str:
    """Cases, rates of each engine, ratio, and how near quire is to the limit on paper."""
    versions = ", ".join(f"{name} {about[name]}" for name, about in report["versions"].items())
    machine = report["machine"]
    lines = [
        f"{report['model']}, commit {report['commit']}, {versions}, {machine['cores']} cores of "
        f"{machine['cpu']}; tokens per second, medians.",
        "",
        "| case | quire | vLLM, tuned | ratio | of the limit on paper |",
        "|---|---:|---:|---:|---:|",
    ]
    ratios = report["ratios"].get("vllm", {})
    for case, row in report["results"].items():
        peer = row.get("vllm", {}).get("tokens_per_second", "")
        ours = row["quire"]["tokens_per_second"]
        limit = f"{row['fraction_of_limit']:.0%}"
        lines.append(f"| {case} | {ours} | {peer} | {ratios.get(case, '')} | {limit} |")
    ready = report["ready_seconds"]
    lines.append(
        f"| start to ready, s | {ready['quire']} | {ready.get('vllm', '')} "
        f"| {ratios.get('start_to_ready', '')} | |"
    )
    return "\n".join(lines)


def kernel_table(report: dict) -> str:
    """A roofline, one row per kernel."""
    lines = [
        f"{report['shape']}, {report['isa']}, {report['threads']} threads; the roof is "
        f"{report['gb_per_second']} GB/s or {report['gflop_per_second']} GFLOP/s.",
        "",
        "| kernel | rows | us | GB/s | GFLOP/s | of the roof |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in report["kernels"]:
        *numbers, share = row.values()
        lines.append("| " + " | ".join(map(str, numbers)) + f" | {share:.0%} |")
    return "\n".join(lines)


def main() -> None:
    tables = []
    for path in sys.argv[1:]:
        report = json.loads(Path(path).read_text("utf-8"))
        tables.append(kernel_table(report) if "kernels" in report else engine_table(report))
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
