"""`quire bench serve`: a load on a server of any make, the table, the result, the report."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.bench.options import ServeOptions
from quire.bench.result import RequestRecord, detailed
from quire.bench.saved import file_of, now, write_result
from quire.bench.serve import RunListener, ServeRun, run_serve
from quire.bench.text_block import heading, row, text_block
from quire.cli.benches.flags import check_writable
from quire.cli.option_flags import add_option_flags, options_from
from quire.cli.parser import Parser
from quire.errors import ConfigError
from quire.utils.process import raise_descriptor_limit
from quire.workload.datasets import DATASETS, REFUSED
from quire.workload.options import DatasetOptions
from quire.workload.request import WorkloadRequest


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(
        "bench serve",
        "Load any OpenAI-compatible server and measure it. Options, figures and the JSON are those "
        "of `vllm bench serve`; docs/benchmarks.md defines them. Exit code 1: a request failed.",
    )
    add_option_flags(parser, ServeOptions)
    add_option_flags(parser, DatasetOptions, "Dataset")
    old = parser.add_argument_group("Other spellings")
    old.add_argument(
        "--dataset", metavar="TEXT", default=None,
        help="The same as --dataset-path; without --dataset-name, a ShareGPT file. Also a name.",
    )  # fmt: skip
    old.add_argument(
        "--trust-remote-code", action="store_true", default=False,
        help="Changes nothing: no code of a model's folder is ever run.",
    )  # fmt: skip
    old.add_argument(
        "--tokenizer-mode", metavar="TEXT", default="auto", choices=("auto", "hf", "fast"),
        help="auto, hf or fast, which are the same here.",
    )  # fmt: skip
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run and print; returns the exit code."""
    namespace = build_parser().parse(arguments)
    settle_dataset(namespace)
    options, dataset = (options_from(namespace, kind) for kind in (ServeOptions, DatasetOptions))
    assert isinstance(options, ServeOptions) and isinstance(dataset, DatasetOptions)
    if dataset.dataset_name == "list":
        print("\n".join(DATASETS))
        print(f"Not available: {', '.join(REFUSED)}")
        return 0
    begun = now()
    check_places(options, begun)
    run = measured(options, dataset)
    result = {"date": begun.strftime("%Y%m%d-%H%M%S"), **run.result}
    show(run, result)
    save(options, run, result, begun)
    return run.exit_code


def measured(
    options: ServeOptions, dataset: DatasetOptions, requests: list[WorkloadRequest] | None = None
) -> ServeRun:
    """The run, or what Ctrl-C left of it: then its exit code is 130.

    Raises:
        KeyboardInterrupt: there is nothing yet.
    """
    raise_descriptor_limit()
    progress = ServeProgress(not options.disable_tqdm)
    try:
        return asyncio.run(run_serve(options, dataset, progress, requests))
    except KeyboardInterrupt:
        if progress.partial is None:
            raise
        return progress.partial


def check_places(options: ServeOptions, at: datetime.datetime) -> None:
    """Tell before the load whether all files can be written.

    Raises:
        ConfigError: a name is a folder's, or its folder can be neither used nor made.
    """
    if options.report:
        _check_place("--report", Path(options.report))
    if wants_result(options) or options.plot_timeline or options.plot_dataset_stats:
        # Without --model, the last name that the file's may hold is known later.
        path = file_of(options, options.model or "model", at)
        flag = "--result-dir" if options.result_filename is None else "--result-filename"
        _check_place(flag, path)


def _check_place(flag: str, path: Path) -> None:
    try:
        if path.parent.is_dir():
            check_writable(str(path), flag)  # tells of a folder with this name
        is_usable = _can_be_written(path)
    except OSError as error:  # such as a name that is too long
        raise ConfigError(f"{flag}: cannot write {str(path)!r}: {error.strerror}") from None
    if not is_usable:
        raise ConfigError(
            f"{flag}: cannot write {str(path)!r}: it may not be written to, or its folder may not "
            "be: name another place"
        )


def _can_be_written(path: Path) -> bool:
    """Whether a file exists and can be changed, or can be made, with the folders above it."""
    if path.exists():
        return os.access(path, os.W_OK)
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def settle_dataset(namespace: argparse.Namespace) -> None:
    """Put `--dataset` where it belongs.

    Raises:
        ConfigError: `--dataset-path` is given as well.
    """
    given = namespace.dataset
    if given is None:
        return
    if given in DATASETS or given in REFUSED:
        namespace.dataset_name = given
        return
    if hasattr(namespace, "dataset_path"):
        raise ConfigError("--dataset and --dataset-path name a file each: give one")
    namespace.dataset_path = given
    if not hasattr(namespace, "dataset_name"):
        namespace.dataset_name = "sharegpt"


def show(run: ServeRun, result: dict[str, Any]) -> None:
    """Print the block, and what a reader should know."""
    print(text_block(result, metrics=run.metrics, percentiles=run.percentiles))
    if probe := result.get("probe"):
        print(heading("Probe Requests"))
        print(row("Probe requests completed:", probe["completed"]))
        print(row("Probe requests failed:", probe["failed"]))
        for name in ("median", "p99", "max"):
            print(row(f"{name.capitalize()} probe E2EL (ms):", probe[f"{name}_e2el_ms"]))
    for note in run.notes:
        print(note, file=sys.stderr)


def save(
    options: ServeOptions, run: ServeRun, result: dict[str, Any], at: datetime.datetime
) -> None:
    """Write the files that were asked for, and say where they are."""
    path = file_of(options, str(result["model_id"]), at)
    if wants_result(options):
        # Before the plots: if they fail, the figures are safe.
        whole = result | detailed(run.outcome.records) if options.save_detailed else result
        write_result(path, whole, append=options.append_result)
        print(f"Result: {path}", file=sys.stderr)
    draw(options, run, result, path)


def wants_result(options: ServeOptions) -> bool:
    """Whether the result goes to a file."""
    return options.save_result or options.append_result or options.save_detailed


def draw(options: ServeOptions, run: ServeRun, result: dict[str, Any], path: Path) -> None:
    """Draw what was asked for."""
    if not (options.report or options.plot_timeline or options.plot_dataset_stats):
        return
    from quire.bench import plots
    from quire.bench.report import ReportRun, write_page, write_report

    name = options.label or str(result["model_id"])
    records = run.outcome.records
    drawn = plots.PlottedRun(name, records)
    title = f"{name}: {len(records)} requests"
    pages: list[Path] = []
    if options.report:
        write_report(options.report, title, [ReportRun(name, result, records)], notes=run.notes)
        pages.append(Path(options.report))
    if options.plot_timeline:
        pages.append(path.with_suffix(".timeline.html"))
        write_page(pages[-1], title, [plots.timeline(drawn)])
    if options.plot_dataset_stats:
        pages.append(path.with_suffix(".dataset_stats.html"))
        write_page(pages[-1], title, [plots.length_histograms([drawn])])
    for page in pages:
        print(f"Plots: {page}", file=sys.stderr)


class ServeProgress(RunListener):
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None
        self._failed = 0
        self.partial: ServeRun | None = None
        """What there is of a run that was interrupted."""

    def interrupted(self, run: ServeRun) -> None:
        """Keep it."""
        self.partial = run

    def note(self, text: str) -> None:
        """Print a note."""
        print(text, file=sys.stderr)

    def begin(self, num_requests: int) -> None:
        """Show the bar."""
        if not self._enabled:
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        failed = TextColumn("{task.fields[failed]} failed")
        columns = (TextColumn("Requests:"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, failed, console=Console(stderr=True))
        self._task = self._bar.add_task("requests", total=num_requests, failed=0)
        self._bar.start()

    def done(self, record: RequestRecord) -> None:
        """Move it on."""
        self._failed += not record.ok
        if self._bar is not None:
            self._bar.update(self._task, advance=1, failed=self._failed)

    def end(self) -> None:
        """Leave it as it is."""
        if self._bar is not None:
            self._bar.stop()
