"""`quire lab NAME`: one experiment, measured on this machine, with its conclusion."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.parser import Parser
from quire.config.cli import add_engine_flags
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.bench.lab.kit import LabReport

ABOUT = {
    "batch": "1 and 100 prompts at once",
    "prefix": "the same prompt ten times, prefix caching on and off",
    "chunk": "token budgets of a step, beside long prompts",
    "eager": "--enforce-eager on and off",
    "kv-dtype": "types of keys and values",
    "swap": "more requests than fit: swapping or computing again",
    "priority": "urgent requests under fcfs and priority",
    "capacity": "the formula for the number of requests that fit",
}
"""What each compares."""


def build_parser() -> Parser:
    """The parser of this command."""
    rows = "; ".join(f"{name}: {about}" for name, about in ABOUT.items())
    parser = Parser(
        "lab", "Measure what one setting does, and say whether an effect was seen.",
        epilog=f"Experiments: {rows}; all: one after the other.",
    )  # fmt: skip
    parser.add_argument("name", nargs="?", default=None, help="Which one; without it, list them.")
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        default=7,
        help="Measurements of each, at least 5. Default: 7.",
    )
    parser.add_argument("--output-json", metavar="PATH", default=None, help="File of all figures.")
    parser.add_argument(
        "--markdown", metavar="PATH", default=None,
        help="File for what is printed, with the machine on which it was measured.",
    )  # fmt: skip
    parser.add_config_flag()
    add_engine_flags(parser, positional=False)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run experiments and print them; returns the exit code."""
    namespace = build_parser().parse(arguments)
    if namespace.name is None:
        print("\n".join(f"{name:<10}{about}" for name, about in ABOUT.items()))
        return 0
    from quire.bench.lab.experiments import EXPERIMENTS
    from quire.cli.benches.flags import check_writable, write_json

    names = list(EXPERIMENTS) if namespace.name == "all" else [namespace.name]
    for name in names:
        EXPERIMENTS.get(name)  # a wrong one is told before the first runs
    check_writable(namespace.output_json)
    check_writable(namespace.markdown, "--markdown")
    reports = list(_run(names, namespace))
    write_json(namespace.output_json, {report.name: report.figures for report in reports})
    if namespace.markdown is not None:
        _write(Path(namespace.markdown), reports, namespace)
    return 0


def _run(names: Iterable[str], namespace: argparse.Namespace) -> Iterable[LabReport]:
    from quire.bench.lab.experiments import EXPERIMENTS
    from quire.bench.lab.kit import Lab
    from quire.cli.benches.flags import llm_options, seed_of
    from quire.cli.progress import CommandProgress

    options: dict[str, Any] = llm_options(namespace)
    for name in names:
        with CommandProgress() as progress:
            lab = Lab(options, namespace.rounds, progress.seen, seed_of(namespace))
            report = EXPERIMENTS.get(name)(lab)
        print(f"{name}: {report.markdown()}\n", flush=True)
        yield report


def _write(path: Path, reports: Sequence[LabReport], namespace: argparse.Namespace) -> None:
    from quire.cli.collect_env import collect

    facts = collect()
    cpu, memory = facts["cpu"], facts["memory"]["total"] / 2**30
    load = os.getloadavg()[0]
    machine = (
        f"{cpu['model']}, {cpu['affinity'] or cpu['logical_cores']} cores, {memory:.0f} GiB, load "
        f"{load:.1f} at the end"
    )
    model = getattr(namespace, "model", None) or "quire-demo"
    head = (
        "# What settings do: experiments\n\n"
        "Written by `quire lab all --markdown FILE`, where each experiment is `quire lab NAME`. "
        "Variants take turns in every round; figures are medians of the rounds. An effect counts "
        "as seen if every round shows it, in the same direction and with at least 5 %.\n\n"
        f"Model: {Path(model).name}; {namespace.rounds} rounds; {machine}.\n"
    )
    parts = [f"\n## quire lab {report.name}\n\n{report.markdown()}\n" for report in reports]
    try:
        path.write_text(head + "".join(parts), "utf-8")
    except OSError as error:
        raise ConfigError(f"--markdown: cannot write {str(path)!r}: {error.strerror}") from None
