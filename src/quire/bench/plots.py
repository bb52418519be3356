"""Plots of records, with plotly: pieces of HTML for a page that holds plotly's script once.

The only place that knows plotly. Colours are those of Okabe and Ito, which colour-blind people can
tell apart; runs differ by dashes and marks as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quire.bench.result import (
    LATENCIES,
    MS,
    RequestRecord,
    concurrency,
    latencies,
    output_times,
    outputs_per_bin,
)
from quire.bench.sweep.front import CurvePoint, Facets, Speed
from quire.errors import StartupError

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash")
MARKS: Final = ("circle", "x", "diamond", "triangle-up", "square")
MOST_POINTS: Final = 4000
"""Points of one curve: more cannot be seen, and make the file large."""
MOST_BARS: Final = 2000
BINS: Final = 200
"""Bins of a curve over time, at most."""
MOST_CHANGE: Final = 10.0
"""Greatest ratio minus 1 that is told exactly: beyond it, only that nothing is known."""


@dataclass(frozen=True, slots=True)
class PlottedRun:
    """The records of one run, and its name in legends."""

    name: str
    records: Sequence[RequestRecord]


def script() -> str:
    """Plotly's own script, to put into the page once.

    Raises:
        StartupError: plotly is not installed.
    """
    return str(_plotly("plotly.offline").get_plotlyjs())


def latency_cdfs(runs: Sequence[PlottedRun]) -> str:
    """Which share of samples is at most so long, for each latency."""
    titles = [title for title, _ in LATENCIES.values()]
    figure = _plotly("plotly.subplots").make_subplots(rows=2, cols=2, subplot_titles=titles)
    for index, run in enumerate(runs):
        for place, samples in enumerate(latencies(run.records).values()):
            x, y = _cdf(samples * MS)
            trace = _line(run.name, x, y, index, first=place == 0)
            figure.add_trace(trace, row=1 + place // 2, col=1 + place % 2)
    figure.update_xaxes(title_text="ms", rangemode="tozero")
    figure.update_yaxes(title_text="share", range=[0, 1.01])
    return _html(figure, "Latencies: cumulative distribution", 640)


def over_time(runs: Sequence[PlottedRun]) -> str:
    """Outputs per second, and requests in flight, from the first start on."""
    titles = ["Outputs per second", "Requests in flight"]
    figure = _plotly("plotly.subplots").make_subplots(
        rows=2, cols=1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.12
    )
    for index, run in enumerate(runs):
        done = [record for record in run.records if record.ok]
        if not done:
            continue
        start = min(record.start for record in done)
        ends = [max([r.start + r.latency, *output_times(r)[-1:]]) for r in done]
        length = max(ends) - start
        width = max(0.1, length / BINS)
        bins = outputs_per_bin(done, width)
        x = (np.arange(len(bins)) + 0.5) * width
        figure.add_trace(_line(run.name, x, bins / width, index), row=1, col=1)
        times, levels = concurrency(done)
        thin = _thinned(len(times))
        level = _line(run.name, times[thin] - start, levels[thin], index, first=False)
        level.line.shape = "hv"
        figure.add_trace(level, row=2, col=1)
    figure.update_xaxes(title_text="seconds", row=2, col=1)
    figure.update_yaxes(rangemode="tozero")
    return _html(figure, "Throughput over time", 560)


def scatters(runs: Sequence[PlottedRun]) -> str:
    """Time to first token by when a request was sent, and by the length of its prompt; gaps between
    outputs by when they ended."""
    titles = ["TTFT by time of sending", "TTFT by prompt length", "Inter-token latency by time"]
    figure = _plotly("plotly.subplots").make_subplots(rows=1, cols=3, subplot_titles=titles)
    for index, run in enumerate(runs):
        done = [r for r in run.records if r.ok and r.first_token is not None]
        if not done:
            continue
        zero = min(record.start for record in done)
        ttft = np.array([record.ttft * MS for record in done])
        starts = np.array([record.start - zero for record in done])
        lengths = np.array([record.input_len for record in done])
        at, gaps = _gaps(done, zero)
        for col, (x, y) in enumerate(((starts, ttft), (lengths, ttft), (at, gaps)), 1):
            thin = _thinned(len(x))
            dots = _dots(run.name, x[thin], y[thin], index, first=col == 1)
            figure.add_trace(dots, row=1, col=col)
    for col, name in enumerate(("seconds", "prompt tokens", "seconds"), 1):
        figure.update_xaxes(title_text=name, row=1, col=col)
    figure.update_yaxes(title_text="ms", rangemode="tozero")
    return _html(figure, "TTFT and inter-token latency", 420)


def timeline(run: PlottedRun) -> str:
    """A bar per request: until its first output, and from there to its end."""
    graphs = _plotly("plotly.graph_objects")
    done = sorted((r for r in run.records if r.ok), key=lambda record: record.start)[:MOST_BARS]
    zero = done[0].start if done else 0.0
    rows = list(range(1, len(done) + 1))
    first = [r.ttft or r.latency for r in done]
    rest = [r.latency - f for r, f in zip(done, first, strict=True)]
    starts = [r.start - zero for r in done]
    figure = graphs.Figure()
    for name, base, length, colour, pattern in (
        ("to the first output", starts, first, COLOURS[4], "/"),
        ("to the end", [s + f for s, f in zip(starts, first, strict=True)], rest, COLOURS[0], ""),
    ):
        figure.add_trace(
            graphs.Bar(
                name=name, y=rows, x=length, base=base, orientation="h",
                marker={"color": colour, "pattern": {"shape": pattern}, "line": {"width": 0}},
            )
        )  # fmt: skip
    figure.update_layout(barmode="overlay", bargap=0.15)
    figure.update_xaxes(title_text="seconds")
    figure.update_yaxes(title_text="request, in the order of sending", autorange="reversed")
    return _html(figure, f"Requests of {run.name}", 600)


def length_histograms(runs: Sequence[PlottedRun]) -> str:
    """How long prompts and outputs were."""
    graphs = _plotly("plotly.graph_objects")
    titles = ["Prompt tokens", "Output tokens"]
    figure = _plotly("plotly.subplots").make_subplots(rows=1, cols=2, subplot_titles=titles)
    for index, run in enumerate(runs):
        done = [record for record in run.records if record.ok]
        for col, values in enumerate(
            ([r.input_len for r in done], [r.output_len for r in done]), 1
        ):
            counts, edges = np.histogram(values, bins=min(60, max(1, len(set(values)))))
            bars = graphs.Bar(
                name=run.name, x=(edges[:-1] + edges[1:]) / 2, y=counts, width=np.diff(edges),
                opacity=0.7, marker={"color": COLOURS[index % len(COLOURS)]},
                legendgroup=run.name, showlegend=col == 1,
            )  # fmt: skip
            figure.add_trace(bars, row=1, col=col)
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(title_text="requests")
    return _html(figure, "Lengths", 380)


def intervals(names: Sequence[str], changes: Sequence[tuple[float, float, float]]) -> str:
    """Differences in percent (low, middle, high) with their intervals around 0. They end at
    `MOST_CHANGE`, or one wide interval would make all others invisible."""
    graphs = _plotly("plotly.graph_objects")
    columns = np.minimum(np.array(changes), MOST_CHANGE) * 100
    low, middle, high = columns.T
    error = {"type": "data", "symmetric": False, "array": high - middle, "arrayminus": middle - low}
    marks = {"color": COLOURS[0], "size": 9}
    dots = graphs.Scatter(x=middle, y=list(names), mode="markers", error_x=error, marker=marks)
    figure = graphs.Figure(dots)
    figure.add_vline(x=0, line_width=1, line_dash="dash")
    figure.update_xaxes(title_text="difference in percent, 95 % interval")
    figure.update_yaxes(autorange="reversed")
    return _html(figure, "Differences", 120 + 28 * len(names))


def curve_plot(
    figure: Facets, title: str, x: str, y: str, *, error_bars: bool = True, log: Sequence[str] = ()
) -> str:
    """Curves of a sweep.

    Args:
        figure: Their panels.
        title: Of all.
        x: What is along.
        y: What is upwards.
        error_bars: Whether to show the least and the most of the runs at each point.
        log: Axes with logarithms: `x`, `y`, or both.
    """
    rows, cols = len(figure.rows), len(figure.cols)
    places = [(row, col) for row in figure.rows for col in figure.cols]
    names = [", ".join(filter(None, place)) for place in places]
    drawn = _plotly("plotly.subplots").make_subplots(
        rows=rows, cols=cols, subplot_titles=names if len(places) > 1 else None,
        shared_xaxes="all", shared_yaxes="all", vertical_spacing=0.3 / max(2, rows),
    )  # fmt: skip
    looks, shown = {name: at for at, name in enumerate(figure.curves)}, set[str]()
    for number, place in enumerate(places):
        for name, points in figure.panels.get(place, {}).items():
            trace = _curve(name, points, looks[name], error_bars, first=name not in shown)
            shown.add(name)
            drawn.add_trace(trace, row=1 + number // cols, col=1 + number % cols)
    drawn.update_xaxes(title_text=x, type="log" if "x" in log else "linear")
    if "y" in log:
        drawn.update_yaxes(title_text=y, type="log")
    else:
        drawn.update_yaxes(title_text=y, rangemode="tozero")
    return _html(drawn, title, 200 + 360 * rows)


def _curve(
    name: str, points: Sequence[CurvePoint], look: int, error_bars: bool, *, first: bool
) -> Any:
    columns = [(point.x, point.y, point.low, point.high) for point in points]
    x, y, low, high = np.array(columns, dtype=np.float64).T
    trace = _line(name, x, y, look, first=first)
    trace.update(mode="lines+markers", marker={"symbol": MARKS[look % len(MARKS)], "size": 8})
    if error_bars and (low < high).any():
        up, down = _short(high - y), _short(y - low)
        trace.update(error_y={"type": "data", "symmetric": False, "array": up, "arrayminus": down})
    return trace


def front_plot(points: Sequence[Speed], front: Sequence[int], total: str) -> str:
    """Points of a sweep and their front; `total` says what is upwards."""
    figure = _plotly("plotly.graph_objects").Figure()
    best = [points[index] for index in front]
    for index, (name, mode, shown) in enumerate(
        (("all", "markers", points), ("Pareto front", "lines+markers+text", best))
    ):
        figure.add_trace(
            {
                "type": "scatter", "name": name, "mode": mode,
                "hovertext": [point.name for point in shown],
                "text": [point.label for point in shown], "textposition": "top center",
                "x": [point.each for point in shown], "y": [point.total for point in shown],
                "marker": {"symbol": MARKS[index], "size": 9, "color": COLOURS[index]},
                "line": {"color": COLOURS[index]},
            }
        )  # fmt: skip
    figure.update_xaxes(title_text="output tokens/s for each user", rangemode="tozero")
    figure.update_yaxes(title_text=total, rangemode="tozero")
    return _html(figure, "Speed for each user against throughput", 560)


def _line(name: str, x: NDArray[Any], y: NDArray[Any], index: int, *, first: bool = True) -> Any:
    look = {"color": COLOURS[index % len(COLOURS)], "dash": DASHES[index % len(DASHES)], "width": 2}
    return _plotly("plotly.graph_objects").Scatter(
        x=_short(x), y=_short(y), mode="lines", name=name, line=look, legendgroup=name,
        showlegend=first,
    )  # fmt: skip


def _dots(name: str, x: NDArray[Any], y: NDArray[Any], index: int, *, first: bool = True) -> Any:
    look = {"color": COLOURS[index % len(COLOURS)], "symbol": MARKS[index % len(MARKS)]}
    look |= {"size": 5, "opacity": 0.6}  # type: ignore[dict-item]
    return _plotly("plotly.graph_objects").Scatter(
        x=_short(x), y=_short(y), mode="markers", name=name, marker=look, legendgroup=name,
        showlegend=first,
    )  # fmt: skip


def _short(values: NDArray[Any]) -> list[float]:
    """Four digits after the point: a microsecond is enough, and the file stays small."""
    return [round(float(value), 4) for value in values]


def _cdf(samples: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
    ordered = np.sort(samples)
    thin = _thinned(len(ordered))
    return ordered[thin], (thin + 1) / max(1, len(ordered))


def _thinned(num: int) -> NDArray[np.int64]:
    """Indices of all points, or of evenly many with the last one."""
    if num <= MOST_POINTS:
        return np.arange(num)
    return np.linspace(0, num - 1, MOST_POINTS).astype(np.int64)


def _gaps(
    done: Sequence[RequestRecord], zero: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Gaps in milliseconds by when they ended, in that order."""
    with_gaps = [r for r in done if r.itls]
    if not with_gaps:
        return np.zeros(0), np.zeros(0)
    first = [r.first_token or 0.0 for r in with_gaps]
    ends = [f + np.cumsum(r.itls) for f, r in zip(first, with_gaps, strict=True)]
    at = np.concatenate(ends) - zero
    gaps = np.concatenate([np.asarray(r.itls) for r in with_gaps]) * MS
    order = np.argsort(at)
    return at[order], gaps[order]


def _html(figure: Any, title: str, height: int) -> str:
    figure.update_layout(
        title=title, height=height, template="plotly_white", margin={"t": 90, "b": 50},
        legend={"orientation": "h", "y": 1.12, "x": 1, "xanchor": "right"},
    )  # fmt: skip
    settings = {"displaylogo": False, "responsive": True}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=settings))


def _plotly(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise StartupError("plots need plotly: pip install 'quire[bench]'") from None
