"""`quire bench sweep plot` and `plot_pareto`: what a sweep found, as a page that opens offline.

Options are those of vLLM, which draws pictures of its figures instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quire.cli.parser import Parser
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.bench.sweep.front import Facets

_FOLDER: Final = "Folder of the sweep, or of several."
_BY: Final = ("fig_by", "row_by", "col_by", "curve_by")
_PLOT: Final[Sequence[tuple[str, str, str | None, str]]] = (
    ("--var-x", "NAME", "total_token_throughput", "Parameter or figure along."),
    ("--var-y", "NAME", "median_ttft_ms", "Upwards."),
    ("--fig-by", "NAMES", None, "A figure for each value of these."),
    ("--row-by", "NAMES", None, "A row of panels for each value of these."),
    ("--col-by", "NAMES", None, "A column of panels for each value of these."),
    ("--curve-by", "NAMES", None, "A curve for each value of these."),
    ("--filter-by", "TEXT", None, "Runs to show, such as max_concurrency<64,max_num_seqs!=4."),
    ("--bin-by", "TEXT", None, "Figures to round down, such as request_throughput%1."),
    ("--scale-x", "SCALE", "linear", "linear or log."),
    ("--scale-y", "SCALE", "linear", "linear or log."),
)


def plot_parser() -> Parser:
    """The parser of `quire bench sweep plot`."""
    parser = Parser("bench sweep plot", "Plot curves of a sweep, as HTML.")
    parser.add_argument("folder", metavar="EXPERIMENT_DIR", help=_FOLDER)
    for flag, metavar, default, text in _PLOT:
        shown = text.replace("%", "%%") + (f" Default: {default}." if default else "")
        parser.add_argument(flag, metavar=metavar, default=default or "", help=shown)
    parser.add_argument(
        "--no-error-bars", dest="error_bars", action="store_false", default=True,
        help="Leave out the least and the most of the runs at each point.",
    )  # fmt: skip
    _add_page_flags(parser, "plot")
    return parser


def _add_page_flags(parser: Parser, name: str) -> None:
    parser.add_argument(
        "--fig-dir", metavar="FOLDER", default="",
        help="Folder of the page, from that of the sweep. Default: that of the sweep.",
    )  # fmt: skip
    parser.add_argument(
        "--fig-name", metavar="NAME", default=name, help=f"Name of the page. Default: {name}."
    )
    parser.add_argument("--output", metavar="FILE", default=None, help="The page, instead.")
    parser.add_argument(
        "--dry-run", action="store_true", default=False, help="Tell what would be drawn, and end."
    )


def _page(namespace: argparse.Namespace) -> Path:
    usual = Path(namespace.folder, namespace.fig_dir, f"{namespace.fig_name}.html")
    return usual if namespace.output is None else Path(namespace.output)


def plot(arguments: Sequence[str]) -> int:
    """Write the page; returns the exit code."""
    namespace = plot_parser().parse(arguments)
    from quire.bench.plots import curve_plot
    from quire.bench.report import table, write_page
    from quire.bench.sweep.front import facets
    from quire.bench.sweep.rows import bins_of, conditions_of, names_of, read_rows, selected

    x, y = namespace.var_x, namespace.var_y
    for axis in ("x", "y"):
        if (scale := getattr(namespace, f"scale_{axis}")) not in ("linear", "log"):
            raise ConfigError(f"--scale-{axis} must be linear or log, got {scale!r}")
    log = [axis for axis in ("x", "y") if getattr(namespace, f"scale_{axis}") == "log"]
    conditions, bins = conditions_of(namespace.filter_by), bins_of(namespace.bin_by)
    rows = selected(read_rows(namespace.folder), conditions, bins)
    by = {name: names_of(getattr(namespace, name)) for name in _BY}
    title, drawn = f"{y} over {x}", facets(rows, x, y, **by)
    if namespace.dry_run:
        for figure in drawn:
            size = f"{len(figure.rows)} x {len(figure.cols)} panels, {len(figure.curves)} curves"
            print(f"{_titled(title, figure)}: {size}")
        return 0
    parts = []
    for figure in drawn:
        head = _titled(title, figure)
        parts.append(curve_plot(figure, head, x, y, error_bars=namespace.error_bars, log=log))
        parts.append(table(["curve", x, y, "of the runs"], _cells(figure), head))
    write_page(_page(namespace), title, parts)
    print(_page(namespace))
    return 0


def _titled(title: str, figure: Facets) -> str:
    return f"{title}: {figure.name}" if figure.name else title


def _cells(figure: Facets) -> list[list[str]]:
    """All points of a figure, for a table."""
    return [
        [
            ", ".join(filter(None, (*place, name))),
            *(f"{value:g}" for value in (at.x, at.y)),
            f"{at.low:g} to {at.high:g}",
        ]
        for place, panel in figure.panels.items()
        for name, points in panel.items()
        for at in points
    ]


def plot_pareto_parser() -> Parser:
    """The parser of `quire bench sweep plot_pareto`."""
    parser = Parser(
        "bench sweep plot_pareto", "Plot speed for each user against throughput of all, as HTML."
    )
    parser.add_argument("folder", metavar="EXPERIMENT_DIR", help=_FOLDER)
    parser.add_argument(
        "--user-count-var", metavar="NAME", default="max_concurrency",
        help="Figure that says how many users there were; where a run has none, the most requests "
        "at once count. Default: max_concurrency.",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-count-var", metavar="NAME", default=None,
        help="Figure that says how many devices computed. Default: num_gpus, gpu_count, or the "
        "product of tensor_parallel_size and pipeline_parallel_size; else 1.",
    )  # fmt: skip
    parser.add_argument(
        "--label-by", metavar="NAMES", default="max_concurrency,gpu_count",
        help="Figures to write beside the points of the front. Default: max_concurrency,gpu_count.",
    )  # fmt: skip
    _add_page_flags(parser, "pareto")
    return parser


def plot_pareto(arguments: Sequence[str]) -> int:
    """Print the front and write the page; returns the exit code."""
    namespace = plot_pareto_parser().parse(arguments)
    from quire.bench.plots import front_plot
    from quire.bench.report import table, write_page
    from quire.bench.sweep.front import pareto_front, speeds
    from quire.bench.sweep.rows import names_of, read_rows

    labels = names_of(namespace.label_by)
    points = speeds(
        read_rows(namespace.folder), namespace.user_count_var, namespace.gpu_count_var, labels
    )
    front = pareto_front([(point.each, point.total) for point in points])
    several = any(point.devices != 1 for point in points)
    total = "tokens/s for each device" if several else "tokens/s of all"
    best = [points[index] for index in front]
    rows = [[point.name, f"{point.each:.2f}", f"{point.total:.2f}"] for point in best]
    for name, each, of in rows:
        print(f"{name}: {each} tokens/s for each user, {of} {total}")
    if namespace.dry_run:
        return 0
    title = f"Output {total}, over those for each user"
    heads = ["on the front", "tokens/s for each user", total]
    plotted = front_plot(points, front, f"output {total}")
    write_page(_page(namespace), title, [plotted, table(heads, rows, "Pareto front")])
    print(_page(namespace))
    return 0
