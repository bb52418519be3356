"""`quire bench compare`: what differs between two results, and what may be chance."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from quire.bench.compare import Difference, compare
from quire.bench.report import ReportRun, change_of, interval_of, write_report
from quire.bench.result import records_of
from quire.bench.saved import read_results
from quire.cli.parser import Parser
from quire.errors import ConfigError


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(
        "bench compare",
        "Compare two results of `quire bench serve --save-detailed`, or of `vllm bench serve`, "
        "with 95 % confidence intervals. A file may hold repetitions (--append-result): from three "
        "on each side on, intervals tell what differs from run to run as well.",
        intermixed=True,
    )
    parser.add_argument("before", metavar="A", nargs="?", default=None, help="Result file.")
    parser.add_argument("after", metavar="B", nargs="?", default=None, help="Result file.")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="Of the bootstrap. Default: 0."
    )
    parser.add_argument("--json", action="store_true", default=False, help="Print JSON.")
    parser.add_argument(
        "--report", metavar="FILE", default=None, help="Write an HTML report with plots."
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Compare and print; returns the exit code."""
    namespace = build_parser().parse(arguments)
    if namespace.after is None:
        raise ConfigError("give two result files: quire bench compare A.json B.json")
    if namespace.seed < 0:
        raise ConfigError(f"--seed must be at least 0, got {namespace.seed}")
    before, after = read_results(namespace.before), read_results(namespace.after)
    differences = compare(before, after, namespace.seed)
    notes = [conclusion(differences, len(before) > 1)]
    if loads := other_loads(before[0], after[0]):
        notes.append(loads)
    if namespace.json:
        rows = [_row(d) for d in differences]
        print(json.dumps(rows, indent=1))
    else:
        print(table_of(differences))
        print(*notes, sep="\n")
    if namespace.report:
        runs = [_run(namespace.before, before), _run(namespace.after, after)]
        title = f"{namespace.before} and {namespace.after}"
        write_report(namespace.report, title, runs, notes=notes, differences=differences)
    return 0


def _row(difference: Difference) -> dict[str, Any]:
    row = {**asdict(difference), "verdict": difference.verdict}
    return row | ({"change": None} if math.isnan(difference.change) else {})  # JSON has no NaN


def table_of(differences: Sequence[Difference]) -> str:
    """The table as text."""
    lines = [f"{'':<32}{'A':>12}{'B':>12}{'B - A':>9}   {'95 % interval':<24}verdict"]
    for d in differences:
        cells = f"{d.name:<32}{d.before:>12.2f}{d.after:>12.2f}{change_of(d):>9}"
        lines.append(f"{cells}   {interval_of(d):<24}{'' if d.low is None else d.verdict}".rstrip())
    return "\n".join(lines)


SINGLE = (
    "One run of each: intervals tell chance among the requests, not what changes from run to run, "
    "such as neighbours on the machine. To compare servers, repeat both in turns, three times or "
    "more (--append-result)."
)


def conclusion(differences: Sequence[Difference], repeated: bool) -> str:
    """What can be said, in a few sentences.

    Args:
        differences: Of all figures.
        repeated: Whether each side has several runs.
    """
    return _conclusion(differences) + ("" if repeated else f" {SINGLE}")


def other_loads(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """A sentence if the two sides were not asked the same; empty if they were."""
    parts = [
        f"{name} ({'none' if one is None else one} and {'none' if other is None else other})"
        for name in ("num_prompts", "request_rate", "burstiness", "max_concurrency")
        if (one := before.get(name)) != (other := after.get(name))
    ]
    return f"The loads differ: {', '.join(parts)}." if parts else ""


def _conclusion(differences: Sequence[Difference]) -> str:
    known = [d for d in differences if d.verdict != "unknown"]
    if not known:
        return "There is too little to tell a difference from chance."
    parts = []
    for verdict in ("better", "worse"):
        names = [d.name for d in known if d.verdict == verdict]
        if names:
            parts.append(f"B is {verdict} in {', '.join(names)}.")
    if not parts:
        return f"No difference beyond chance in {len(known)} figures."
    by_chance = f" Of {len(known)} figures, one in twenty would differ by chance alone."
    return " ".join(parts) + by_chance


def _run(path: str, group: Sequence[dict[str, Any]]) -> ReportRun:
    """The first run of a side; plots need its details."""
    return ReportRun(path, group[0], records_of(group[0]))
