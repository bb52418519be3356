"""What a sweep shows: curves over a parameter, and the Pareto front of speed against throughput."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.spelling import did_you_mean

Row = Mapping[str, Any]


def read_rows(folder: str) -> list[dict[str, Any]]:
    """The rows of a sweep's `summary.json`.

    Raises:
        ConfigError: there is none, or it has no rows.
    """
    path = Path(folder) / "summary.json"
    try:
        rows = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder!r} is no folder of a sweep: {path.name}: {error}") from None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{str(path)!r} has no run that ended well")
    return rows


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


def number(row: Row, name: str) -> float:
    """A figure of a row.

    Raises:
        ConfigError: the row has none of that name, or it is no number.
    """
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        numbers = [k for k, v in row.items() if isinstance(v, (int, float))]
        hint = did_you_mean(name, numbers)
        raise ConfigError(f"{row.get('point', 'a run')} has no number {name!r}{hint}")
    return float(value)


def curves(
    rows: Sequence[Row], x: str, y: str, by: Sequence[str]
) -> dict[str, list[tuple[float, float]]]:
    """The median of `y` over the runs at each `x`, ascending, a curve for each value of `by`.

    Raises:
        ConfigError: a row lacks one of them.
    """
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if missing := next((name for name in by if name not in row), None):
            raise ConfigError(f"{row.get('point', 'a run')} has no {missing!r}")
        name = ", ".join(f"{key}={row[key]}" for key in by) or y
        found.setdefault(name, {}).setdefault(number(row, x), []).append(number(row, y))
    return {
        name: [(at, statistics.median(values)) for at, values in sorted(points.items())]
        for name, points in found.items()
    }


def speeds(rows: Sequence[Row], users: str) -> list[tuple[str, float, float]]:
    """Of each point its name, output tokens per second and user, and output tokens per second of
    all; medians over its runs.

    Args:
        rows: Of a sweep.
        users: Which figure says how many users there were.

    Raises:
        ConfigError: a row lacks a figure, or has no user.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        total, num = number(row, "output_throughput"), number(row, users)
        if num <= 0:
            raise ConfigError(f"{users} must be above 0, got {num:g}")
        found.setdefault(str(row["point"]), []).append((total / num, total))
    return [
        (name, statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs))
        for name, pairs in found.items()
    ]
