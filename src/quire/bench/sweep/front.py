"""What a sweep shows: curves over a parameter, and the Pareto front of speed against throughput."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from quire.bench.sweep.rows import Row, grouped, number
from quire.errors import ConfigError


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats: none is at least as large in both and larger in
    one. Ascending in the first; of equal points, all."""
    order = sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1]))
    front: list[int] = []
    best, best_at = float("-inf"), float("inf")
    for index in order:
        x, y = points[index]
        if y > best or (y == best and x == best_at):
            front.append(index)
            best, best_at = y, x
    return front[::-1]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What the runs at one place of a curve gave."""

    x: float
    y: float
    """Median."""
    low: float
    """Least."""
    high: float
    """Most."""


def curves(rows: Sequence[Row], x: str, y: str, by: Sequence[str]) -> dict[str, list[CurvePoint]]:
    """`y` over the runs at each `x`, ascending, a curve for each value of `by`.

    Raises:
        ConfigError: a row lacks one of them.
    """
    found = {}
    for name, some in grouped(rows, by).items():
        at: dict[float, list[float]] = {}
        for row in some:
            at.setdefault(number(row, x), []).append(number(row, y))
        found[name or y] = [
            CurvePoint(place, statistics.median(values), min(values), max(values))
            for place, values in sorted(at.items())
        ]
    return found


@dataclass(frozen=True, slots=True)
class Facets:
    """A figure: curves in rows and columns of panels."""

    name: str
    """What its rows have in common; empty if all are in one."""
    rows: list[str]
    cols: list[str]
    panels: dict[tuple[str, str], dict[str, list[CurvePoint]]]
    """Curves by row and column; none where no run is of both."""

    @property
    def curves(self) -> list[str]:
        """Names of all curves."""
        return list(dict.fromkeys(name for panel in self.panels.values() for name in panel))


def facets(
    rows: Sequence[Row],
    x: str,
    y: str,
    *,
    fig_by: Sequence[str] = (),
    row_by: Sequence[str] = (),
    col_by: Sequence[str] = (),
    curve_by: Sequence[str] = (),
) -> list[Facets]:
    """A figure for each value of `fig_by`, with a row and a column of panels and a curve for each
    value of the others.

    Raises:
        ConfigError: a row lacks one of the names.
    """
    made = []
    for name, some in grouped(rows, fig_by).items():
        panels = {
            (row, col): curves(few, x, y, curve_by)
            for row, these in grouped(some, row_by).items()
            for col, few in grouped(these, col_by).items()
        }
        made.append(Facets(name, list(grouped(some, row_by)), list(grouped(some, col_by)), panels))
    return made


@dataclass(frozen=True, slots=True)
class Speed:
    """A point of the Pareto plot."""

    name: str
    label: str
    """Some of its figures."""
    each: float
    """Output tokens per second for each user."""
    total: float
    """Output tokens per second of all users, for each device."""
    devices: float = 1.0


def speeds(
    rows: Sequence[Row], users: str, devices: str | None = None, labels: Sequence[str] = ()
) -> list[Speed]:
    """What each combination of parameters gave; medians over its runs.

    Args:
        rows: Of a sweep.
        users: Which figure says how many users there were. A row without it says how many requests
            there were at most.
        devices: Which figure says how many devices computed; `None`: as `devices_of` finds.
        labels: Figures for the label, where rows have them.

    Raises:
        ConfigError: a row lacks a figure, or has no user or no device.
    """
    found: dict[str, list[Speed]] = {}
    for row in rows:
        total = number(row, "output_throughput")
        num = number(row, users if row.get(users) is not None else _MOST_USERS)
        used = devices_of(row) if devices is None else number(row, devices)
        for what, count in ((users, num), (devices or "devices", used)):
            if count <= 0:
                raise ConfigError(f"{what} must be above 0, got {count:g}")
        known = {**row, users: f"{num:g}", "gpu_count": f"{used:g}"}
        label = ", ".join(f"{key}={known[key]}" for key in labels if known.get(key) is not None)
        speed = Speed(str(row["point"]), label, total / num, total / used, used)
        found.setdefault(speed.name, []).append(speed)
    return [
        replace(
            runs[0],
            each=statistics.median(run.each for run in runs),
            total=statistics.median(run.total for run in runs),
        )
        for runs in found.values()
    ]


_MOST_USERS: Final = "max_concurrent_requests"


def devices_of(row: Row) -> float:
    """How many devices computed, as a row says; 1 if it does not."""
    for name in ("num_gpus", "gpu_count"):
        if row.get(name) is not None:
            return number(row, name)
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    return math.prod(number(row, name) for name in sizes if row.get(name) is not None)
