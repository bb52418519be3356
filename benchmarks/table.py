"""The tables of docs/cpu-kernels.md from what the benchmarks wrote.

    python benchmarks/table.py benchmarks/results/*.json

Reads what `cpu_engine.py --json` wrote before it became `quire bench engine`, which prints its own
table, and the output of `cpu_kernels.py --json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NAMES = {"vllm": "vLLM tuned", "vllm_default": "vLLM default", "llama_cpp": "llama.cpp"}


def engine_table(report: dict) -> str:
    """Cases, rates of each engine, ratios, and how near quire is to the limit on paper."""
    versions = ", ".join(
        f"{name} {about[name]}" for name, about in report["versions"].items() if name in about
    )
    machine = report["machine"]
    peers = list(report["ratios"])
    heads = [text for peer in peers for text in (NAMES[peer], "ratio")]
    lines = [
        f"{report['model']}, commit {report['commit']}, {versions}, {machine['cores']} cores of "
        f"{machine['cpu']}; tokens per second, medians.",
        "",
        "| case | quire | " + " | ".join([*heads, "of the limit on paper"]) + " |",
        "|---" + "|---:" * (2 + len(heads)) + "|",
    ]
    for case, row in report["results"].items():
        cells = [case, row["quire"]["tokens_per_second"]]
        for peer in peers:
            cells += [
                row.get(peer, {}).get("tokens_per_second", ""),
                report["ratios"][peer].get(case, ""),
            ]
        limit = row["limit"]
        cells.append(
            f"{limit['fraction']:.0%} ({_range(limit['gb_per_second'])} GB/s, "
            f"{_range(limit['gflop_per_second'])} GFLOP/s)"
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    ready = report["ready_seconds"]
    cells = ["start to ready, s", ready["quire"]]
    for peer in peers:
        cells += [ready[peer], report["ratios"][peer]["start_to_ready"]]
    lines.append("| " + " | ".join(map(str, cells)) + " | |")
    return "\n".join(lines)


def _range(values: list[float]) -> str:
    low, high = round(min(values)), round(max(values))
    return str(low) if low == high else f"{low} to {high}"


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
