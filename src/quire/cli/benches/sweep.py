"""`quire bench sweep KIND`: a benchmark over a grid of parameters. Plots are in `sweep_plots`."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire.cli.parser import Parser
from quire.errors import ConfigError
from quire.registry import Registry

SWEEPS: Registry[Callable[[Sequence[str]], int]] = Registry(
    "kind of sweep",
    {
        "serve": "quire.cli.benches.sweep:serve",
        "serve_workload": "quire.cli.benches.sweep:serve_workload",
        "startup": "quire.cli.benches.sweep:startup",
        "plot": "quire.cli.benches.sweep_plots:plot",
        "plot_pareto": "quire.cli.benches.sweep_plots:plot_pareto",
    },
)
"""Kinds of sweeps by name."""
ABOUT = {
    "serve": "servers and loads, every combination",
    "serve_workload": "one load at rates or concurrencies between the least and the most",
    "startup": "starts of the engine",
    "plot": "curves of a sweep, as HTML",
    "plot_pareto": "speed for each user against throughput of all, as HTML",
}
"""What each is, for the list."""


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("bench sweep", "Run a benchmark over a grid of parameters, or plot a sweep.")
    parser.add_argument("kind", nargs="?", default=None, help="Which one; without it, list them.")
    return parser


def main(arguments: Sequence[str]) -> int:
    """List the kinds, or hand over to one; returns the exit code."""
    if arguments and not arguments[0].startswith("-"):
        return SWEEPS.get(arguments[0])(arguments[1:])
    build_parser().parse(arguments)
    print("\n".join(f"{name:<16}{ABOUT[name]}" for name in SWEEPS))
    return 0


def _parser(kind: str, rows: Sequence[tuple[str, type, Any, str]]) -> Parser:
    parser = Parser(f"bench sweep {kind}", f"Sweep: {ABOUT[kind]}.")
    common: list[tuple[str, type, Any, str]] = [
        ("-o --output-dir", str, "results", "Folder of all sweeps."),
        ("-e --experiment-name", str, kind, "Folder of this one; what is there already is kept."),
        ("--num-runs", int, 3, "Runs of each combination."),
        ("--run-timeout", float, 3600.0, "Seconds of one run."),
    ]
    for flags, kind_of, default, text in [*rows, *common]:
        shown = "" if default is None else f" Default: {default}."
        parser.add_argument(
            *flags.split(), type=kind_of, default=default, help=text + shown,
            metavar={str: "TEXT", int: "N", float: "X"}[kind_of],
        )  # fmt: skip
    parser.add_argument(
        "--resume", metavar="NAME", nargs="?", default=None, const="",
        help="Go on with a sweep that must be there: the one of this name, or of "
        "--experiment-name. Without it, one that is there goes on as well, and else it is new.",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true", default=False, help="Tell what would run, and end."
    )
    parser.add_argument(
        "--show-stdout", action="store_true", default=False, help="Show what benchmarks print."
    )
    return parser


_SERVER = [
    ("--serve-cmd", str, None, "Command that starts the server; without it, one is running."),
    ("--bench-cmd", str, "quire bench serve", "Command of the load."),
    ("--after-bench-cmd", str, None, "Command after each run, to clear caches."),
    ("--serve-params", str, None, "JSON file: parameters of the server."),
    ("--bench-params", str, None, "JSON file: parameters of the load."),
    (
        "--link-vars",
        str,
        None,
        "Parameters of server and load that must be equal, such as "
        "max_num_seqs=max_concurrency; other combinations are left out.",
    ),
    ("--server-ready-timeout", int, 600, "Seconds that a server has to become ready."),
]


def serve_parser() -> Parser:
    """The parser of `quire bench sweep serve`."""
    return _parser("serve", _SERVER)


def serve_workload_parser() -> Parser:
    """The parser of `quire bench sweep serve_workload`."""
    own = [
        ("--workload-var", str, "request_rate", "request_rate or max_concurrency."),
        ("--workload-iters", int, 10, "Values of it, the two extremes included."),
    ]
    return _parser("serve_workload", [*_SERVER, *own])


def startup_parser() -> Parser:
    """The parser of `quire bench sweep startup`."""
    own = [
        ("--startup-cmd", str, "quire bench startup", "Command of the starts."),
        ("--serve-params", str, None, "JSON file: parameters of the engine."),
        ("--startup-params", str, None, "JSON file: parameters of the starts."),
    ]
    return _parser("startup", own)


def serve(arguments: Sequence[str]) -> int:
    """Run the grid; returns the exit code: 1 if a run failed."""
    from quire.bench.sweep.grid import links_of

    namespace = serve_parser().parse(arguments)
    links = links_of(namespace.link_vars or "")
    return _sweep(namespace, _inners(namespace), _commands(namespace), links=links)


def serve_workload(arguments: Sequence[str]) -> int:
    """Find the extremes, then run between them; returns the exit code."""
    from quire.bench.sweep.workload import between, extremes

    namespace = serve_workload_parser().parse(arguments)
    var, num = namespace.workload_var, namespace.workload_iters
    ends = extremes(var, num)
    commands = _commands(namespace)
    inners = _inners(namespace)
    if len(inners) > 1:
        raise ConfigError("--bench-params: a curve is of one load: give one set of parameters")
    outers = _linked(namespace, inners)
    code = _sweep(namespace, [{**inners[0], **end} for end in ends], commands, outers)
    if code or namespace.dry_run:
        return code
    for outer in outers:
        rows = _rows(namespace, [outer], [{**inners[0], **end} for end in ends])
        middle = [{**inners[0], var: value} for value in between(rows, var, num)]
        code |= _sweep(namespace, middle, commands, [outer])
    return code


def startup(arguments: Sequence[str]) -> int:
    """Run the grid; returns the exit code."""
    from quire.bench.sweep.grid import command_of, read_params
    from quire.bench.sweep.run import SweepCommands

    namespace = startup_parser().parse(arguments)
    commands = SweepCommands(
        command_of(namespace.startup_cmd, "--startup-cmd"), timeout=namespace.run_timeout,
        is_startup=True, show_stdout=namespace.show_stdout,
    )  # fmt: skip
    return _sweep(namespace, read_params(namespace.startup_params, "--startup-params"), commands)


def _inners(namespace: argparse.Namespace) -> list[dict[str, Any]]:
    from quire.bench.sweep.grid import read_params

    return read_params(namespace.bench_params, "--bench-params")


def _outers(namespace: argparse.Namespace) -> list[dict[str, Any]]:
    from quire.bench.sweep.grid import read_params

    return read_params(namespace.serve_params, "--serve-params")


def _linked(namespace: argparse.Namespace, inners: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The servers for which `--link-vars` leaves a load."""
    from quire.bench.sweep.grid import links_of, points_of

    links = links_of(namespace.link_vars or "")
    points = points_of(_root(namespace), _outers(namespace), inners, 1, links)
    return [point.outer for point in points]


def _commands(namespace: argparse.Namespace) -> Any:
    from quire.bench.sweep.grid import command_of
    from quire.bench.sweep.run import SweepCommands

    if namespace.serve_cmd is None and namespace.serve_params is not None:
        raise ConfigError("--serve-params needs --serve-cmd, the server that they are for")

    def words(flag: str) -> list[str] | None:
        text = getattr(namespace, flag)
        return None if text is None else command_of(text, "--" + flag.replace("_", "-"))

    bench = words("bench_cmd") or []
    if namespace.serve_cmd is not None:
        bench += ["--ready-check-timeout-sec", str(namespace.server_ready_timeout)]
    return SweepCommands(
        bench, words("serve_cmd"), words("after_bench_cmd"),
        namespace.run_timeout, show_stdout=namespace.show_stdout,
    )  # fmt: skip


def _root(namespace: argparse.Namespace) -> Path:
    root = Path(namespace.output_dir) / str(namespace.resume or namespace.experiment_name)
    if namespace.resume is not None and not root.is_dir():
        raise ConfigError(f"--resume: there is no folder {str(root)!r} to go on with")
    return root


def _given(namespace: argparse.Namespace) -> dict[str, str | None]:
    """The commands that results depend on, by flag."""
    names = ("bench_cmd", "serve_cmd", "after_bench_cmd", "startup_cmd")
    known = [name for name in names if hasattr(namespace, name)]
    return {f"--{name.replace('_', '-')}": getattr(namespace, name) for name in known}


def _check_programs(commands: dict[str, str | None]) -> None:
    from quire.bench.sweep.grid import command_of

    for flag, text in commands.items():
        if text is not None and shutil.which(program := command_of(text, flag)[0]) is None:
            raise ConfigError(f"{flag}: there is no program {program!r} that can be run")


def _rows(namespace: argparse.Namespace, outers: Any, inners: Any) -> list[dict[str, Any]]:
    from quire.bench.sweep.grid import points_of
    from quire.bench.sweep.run import rows_of

    return rows_of(points_of(_root(namespace), outers, inners, namespace.num_runs))


def _sweep(
    namespace: argparse.Namespace,
    inners: list[dict[str, Any]],
    commands: Any,
    outers: list[dict[str, Any]] | None = None,
    links: Sequence[tuple[str, str]] = (),
) -> int:
    from quire.bench.sweep.experiment import check_commands, open_folder
    from quire.bench.sweep.grid import arguments_of, points_of
    from quire.bench.sweep.run import merged_rows, rows_of, run_points, tell, write_summary

    root, given = _root(namespace), _given(namespace)
    if not namespace.run_timeout > 0:
        raise ConfigError(f"--run-timeout must be above 0 seconds, got {namespace.run_timeout:g}")
    points = points_of(root, outers or _outers(namespace), inners, namespace.num_runs, links)
    check_commands(root, given)
    if namespace.dry_run:
        for point in points:
            state = "" if point.result() is None else " (done)"
            both = " ".join([*arguments_of(point.outer), "|", *arguments_of(point.inner)])
            print(f"{point.name}: {both}{state}")
        return 0
    _check_programs(given)
    open_folder(root, given)
    outcome = run_points(points, commands, tell)
    rows = rows_of(points)
    if rows:
        path = write_summary(root, merged_rows(root, rows))
        print(f"{len(rows)} of {len(points)} runs, {outcome.num_found} of them from before: {path}")
    if outcome.failures:
        print(f"{len(outcome.failures)} of {len(points)} runs failed", file=sys.stderr)
    return 1 if outcome.failures else 0
