"""One HTML file with figures and plots of one run or several. It opens offline, and prints.

Everything is in the file, plotly's script too, and its content policy forbids it to load anything.
Who simulates instead of measuring passes the same records. Knows no server.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire.bench import plots
from quire.bench.compare import Difference
from quire.bench.plots import PlottedRun
from quire.bench.result import LATENCIES, RequestRecord, percentile_name
from quire.errors import ConfigError

_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)
_STYLE: Final = """
body { font: 16px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
  color: #1b1b1b; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; margin: 1rem 0; } caption { text-align: left; color: #555; }
th, td { border-bottom: 1px solid #ccc; padding: .25rem .9rem .25rem 0; text-align: right; }
th:first-child, td:first-child { text-align: left; }
@media print { body { margin: 0; max-width: none; }
  .plotly-graph-div, table { break-inside: avoid; }
  .modebar { display: none !important; } }
"""
_FIGURES: Final = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Duration (s)",
    "request_rate": "Request rate configured (req/s)",
    "max_concurrency": "Maximum request concurrency",
    "total_input_tokens": "Total input tokens",
    "total_output_tokens": "Total generated tokens",
    "request_throughput": "Request throughput (req/s)",
    "request_goodput": "Request goodput (req/s)",
    "input_throughput": "Input token throughput (tok/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_token_throughput": "Total token throughput (tok/s)",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s)",
    "max_concurrent_requests": "Peak concurrent requests",
}


@dataclass(frozen=True, slots=True)
class ReportRun:
    """One run of a report."""

    name: str
    result: Mapping[str, Any]
    """Figures: keys of `result.summary`."""
    records: Sequence[RequestRecord]


def write_report(
    path: str | Path,
    title: str,
    runs: Sequence[ReportRun],
    *,
    notes: Iterable[str] = (),
    differences: Sequence[Difference] = (),
) -> None:
    """Write the page: notes, the table of figures, differences if there are any, the plots.

    Raises:
        ConfigError: the file cannot be written.
        StartupError: plotly is not installed.
    """
    plotted = [PlottedRun(run.name, run.records) for run in runs]
    parts = [*_notes(notes), figures_table(runs)]
    if differences:
        parts += [differences_table(differences), *_interval_plot(differences)]
    parts += [make(plotted) for make in OVERVIEWS]
    write_page(path, title, parts)


OVERVIEWS: Final[tuple[Callable[[Sequence[PlottedRun]], str], ...]] = (
    plots.latency_cdfs,
    plots.over_time,
    plots.scatters,
)
"""The plots of every report."""


def write_page(path: str | Path, title: str, parts: Iterable[str]) -> None:
    """Write a page of HTML parts that may hold plots.

    Raises:
        ConfigError: the file cannot be written.
        StartupError: plotly is not installed.
    """
    shown = html.escape(title)
    page = "\n".join([
        "<!DOCTYPE html>", '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{shown}</title><style>{_STYLE}</style>",
        f"<script>{plots.script()}</script></head><body><h1>{shown}</h1>", *parts, "</body></html>",
    ])  # fmt: skip
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(page + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report {str(path)!r}: {error.strerror}") from None


def figures_table(runs: Sequence[ReportRun]) -> str:
    """All figures, a column per run."""
    rows = []
    for key, name in _rows_of(runs):
        cells = [_number(run.result.get(key)) for run in runs]
        if any(cells):
            rows.append([name, *cells])
    return table(["", *(run.name for run in runs)], rows, "Figures")


def differences_table(differences: Sequence[Difference]) -> str:
    """What a comparison found."""
    rows = [
        [d.name, _number(d.before), _number(d.after), change_of(d), interval_of(d), d.verdict]
        for d in differences
    ]
    heads = ["", "before", "after", "difference", "95 % interval", "verdict"]
    return table(heads, rows, "Differences")


def change_of(difference: Difference) -> str:
    """`+3.4%`; empty if there is nothing to compare with."""
    return "" if math.isnan(difference.change) else f"{difference.change:+.1%}"


def interval_of(difference: Difference) -> str:
    """`-1.2% to +3.4%`, or why there is none."""
    if difference.low is None or difference.high is None:
        return difference.note
    if difference.high > plots.MOST_CHANGE:
        return f"{difference.low:+.1%} to over {plots.MOST_CHANGE:+.0%}"
    return f"{difference.low:+.1%} to {difference.high:+.1%}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """An HTML table."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    return f"<table><caption>{html.escape(caption)}</caption><tr>{head}</tr>{body}</table>"


def _notes(notes: Iterable[str]) -> list[str]:
    return [f"<p>{html.escape(note)}</p>" for note in notes]


def _interval_plot(differences: Sequence[Difference]) -> list[str]:
    known = [d for d in differences if d.low is not None and d.high is not None]
    if not known:
        return []
    changes = [(d.low or 0.0, d.change, d.high or 0.0) for d in known]
    return [plots.intervals([d.name for d in known], changes)]


def _rows_of(runs: Sequence[ReportRun]) -> list[tuple[str, str]]:
    rows = list(_FIGURES.items())
    percentiles = {
        key.split("_")[0]: float(key.split("_")[0][1:])
        for run in runs
        for key in run.result
        if key.startswith("p") and key.endswith("_ms") and key[1].isdigit()
    }
    kinds = ["mean", "median", *sorted(percentiles, key=lambda kind: percentiles[kind])]
    for name, (_, short) in LATENCIES.items():
        for kind in kinds:
            value = percentiles.get(kind)
            shown = kind.capitalize() if value is None else percentile_name(value).upper()
            rows.append((f"{kind}_{name}_ms", f"{shown} {short} (ms)"))
    return rows


def _number(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
