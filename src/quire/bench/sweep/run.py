"""Runs the points of a sweep that have no result yet, and sums up all that have.

A result gets its name only when its run has ended well, so a sweep that was killed goes on where it
was: the same command with the same `--output-dir` and `--experiment-name`. A server that dies ends
the run that asks it. Knows no flags of commands but those with which results are saved.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Final

from quire.bench.sweep.grid import NAME_KEY, Point, arguments_of
from quire.bench.sweep.server_place import is_here, is_taken, place_of, port_of
from quire.utils.process import die_with_parent, terminate

GRACE: Final = 30.0
"""Seconds that a server has to end."""
CHECK_SECONDS: Final = 0.1
SUMMARY: Final = "summary.csv"


@dataclass
class SweepCommands:
    """What is run for each point."""

    bench: list[str]
    serve: list[str] | None = None
    """Started once for all points with equal outer parameters; None: nothing is started."""
    after: list[str] | None = None
    """Run after each point, to clear caches."""
    timeout: float = 3600.0
    """Seconds of one run."""
    is_startup: bool = False
    """`bench` takes the outer parameters and --output-json, instead of `bench serve`'s options."""
    show_stdout: bool = False


@dataclass
class SweepOutcome:
    """What was done."""

    num_run: int = 0
    num_found: int = 0
    """Points that had a result before."""
    failures: list[str] = field(default_factory=list)


def run_points(
    points: Sequence[Point],
    commands: SweepCommands,
    told: Callable[[str], None] = lambda text: None,
) -> SweepOutcome:
    """Run what has no result yet.

    Args:
        points: Of the sweep, those of one server together.
        commands: What to run.
        told: Hears of every point.
    """
    outcome = SweepOutcome()
    for _, group in groupby(points, key=lambda point: json.dumps(point.outer)):
        todo = list(group)
        left = [point for point in todo if point.result() is None]
        outcome.num_found += len(todo) - len(left)
        if left:
            _run_group(left, commands, outcome, told)
    return outcome


def _run_group(
    points: Sequence[Point],
    commands: SweepCommands,
    outcome: SweepOutcome,
    told: Callable[[str], None],
) -> None:
    points[0].folder.mkdir(parents=True, exist_ok=True)
    server, problem = None, ""
    log = points[0].folder.parent / f"{points[0].folder.name.partition('-BENCH-')[0]}.log"
    with open(log, "a", encoding="utf-8") as said:
        try:
            if commands.serve is not None:
                words = [*commands.serve, *arguments_of(points[0].outer)]
                if not (problem := _misplaced(points, commands, port_of(words))):
                    try:
                        server = _start(words, said)
                    except OSError as reason:
                        problem = _not_started(words, reason)
            for point in points:
                error = problem or _run_point(point, commands, server)
                outcome.num_run += 1
                if error:
                    outcome.failures.append(f"{point.name}: {error}")
                told(f"{point.name}: {error or 'done'}")
        finally:
            if server is not None:
                terminate(server, GRACE)


def _misplaced(points: Sequence[Point], commands: SweepCommands, port: int | None) -> str:
    """What is wrong if a load will ask where the server does not listen, which has this port, or
    where somebody else does; empty: nothing."""
    asked = (place_of([*commands.bench, *arguments_of(point.inner)]) for point in points)
    for place in dict.fromkeys(asked):
        if place is None:
            continue
        if port is not None and is_here(place) and place[1] != port:
            return (
                f"the load would ask port {place[1]}, but --serve-cmd listens on {port}: give both "
                "the same --port"
            )
        if is_taken(place):
            return (
                f"another server listens at {place[0]}:{place[1]} already and would be measured "
                "instead: stop it, or give --serve-cmd and --bench-cmd another port"
            )
    return ""


def _not_started(words: Sequence[str], error: OSError) -> str:
    return f"{words[0]!r} cannot be started: {error.strerror}"


def _run_point(point: Point, commands: SweepCommands, server: subprocess.Popen[Any] | None) -> str:
    """Why it failed; empty if it did not."""
    point.folder.mkdir(parents=True, exist_ok=True)
    part = point.file.with_suffix(".part")
    part.unlink(missing_ok=True)
    words = [*commands.bench, *arguments_of(point.inner)]
    if commands.is_startup:
        words += [*arguments_of(point.outer), "--output-json", str(part)]
    else:
        words += ["--save-result", "--result-dir", str(part.parent), "--result-filename", part.name]
    with open(point.file.with_suffix(".log"), "w", encoding="utf-8") as log:
        error = _run(words, None if commands.show_stdout else log, server, commands)
        if not error and commands.after is not None:
            error = _run(commands.after, log, server, commands)
    if error:
        return f"{error}; see {point.file.with_suffix('.log')}"
    try:
        json.loads(part.read_text("utf-8"))
    except (OSError, ValueError):
        return f"it wrote no result to {part}"
    os.replace(part, point.file)
    return ""


def _run(
    words: Sequence[str],
    output: IO[str] | None,
    server: subprocess.Popen[Any] | None,
    commands: SweepCommands,
) -> str:
    try:
        process = _start(words, output)
    except OSError as error:
        return _not_started(words, error)
    return _wait(process, server, commands)


def _start(words: Sequence[str], output: IO[str] | None) -> subprocess.Popen[Any]:
    parent = os.getpid()
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        preexec_fn=lambda: die_with_parent(parent) and None,
    )  # fmt: skip


def _wait(
    process: subprocess.Popen[Any], server: subprocess.Popen[Any] | None, commands: SweepCommands
) -> str:
    deadline = time.monotonic() + commands.timeout
    try:
        while (code := process.poll()) is None:
            if error := _end_of(server):
                return error
            if time.monotonic() > deadline:
                return f"no end after {commands.timeout:g} s (--run-timeout)"
            time.sleep(CHECK_SECONDS)
        # A load may end well without its server: another one may have answered.
        return _end_of(server) or (f"it ended with code {code}" if code else "")
    finally:
        if process.poll() is None:
            terminate(process, GRACE)


def _end_of(server: subprocess.Popen[Any] | None) -> str:
    """How the server ended; empty if it runs, or none was started."""
    if server is None or server.poll() is None:
        return ""
    return f"the server ended with code {server.returncode}"


def rows_of(points: Iterable[Point]) -> list[dict[str, Any]]:
    """A row for each point that has a result: parameters, then the figures that are one number or
    text. Where both have a name, the result's counts."""
    rows = []
    for point in points:
        result = point.result()
        if result is not None:
            given = {k: v for k, v in {**point.outer, **point.inner}.items() if k != NAME_KEY}
            plain = {k: v for k, v in result.items() if not isinstance(v, (list, dict))}
            rows.append({"point": point.folder.name, "run": point.run, **given, **plain})
    return rows


def merged_rows(root: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """These rows, after those of a summary that is there, as far as they are of other runs."""
    try:
        before = json.loads((root / "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        before = []
    ours = {(row["point"], row["run"]) for row in rows}
    kept = [row for row in before if (row.get("point"), row.get("run")) not in ours]
    return [*kept, *rows]


def write_summary(root: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write `summary.json` and the same as CSV; returns the latter."""
    (root / "summary.json").write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path = root / SUMMARY
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def tell(text: str) -> None:
    """On stderr, at once."""
    print(text, file=sys.stderr, flush=True)
