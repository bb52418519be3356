"""Few rows that hold every pair of values of a table of parameters. Knows no parameter."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Table = Mapping[str, Sequence[Any]]
Pair = tuple[str, int, str, int]
"""Two parameters and the places of their values."""


def pairs_of(table: Table) -> set[Pair]:
    """All pairs of values of different parameters."""
    return {
        (one, i, two, j)
        for one, two in combinations(table, 2)
        for i in range(len(table[one]))
        for j in range(len(table[two]))
    }


def covering_rows(table: Table, rng: random.Random) -> list[dict[str, Any]]:
    """Rows with a value for every parameter; each pair is in at least one.

    Greedy: a row begins with a pair that is still missing; then each parameter, in random order,
    takes the value that brings the most missing pairs.
    """
    missing = pairs_of(table)
    names = list(table)
    place = {name: number for number, name in enumerate(names)}

    def pair(one: str, i: int, two: str, j: int) -> Pair:
        return (one, i, two, j) if place[one] < place[two] else (two, j, one, i)

    rows = []
    while missing:
        one, i, two, j = min(missing, key=lambda p: (place[p[0]], p[1], place[p[2]], p[3]))
        row = {one: i, two: j}
        others = [name for name in names if name not in row]
        rng.shuffle(others)
        for name in others:
            chosen = list(row.items())
            gains = [
                sum(pair(name, v, other, w) in missing for other, w in chosen)
                for v in range(len(table[name]))
            ]
            best = max(gains)
            row[name] = rng.choice([v for v, gain in enumerate(gains) if gain == best])
        missing -= {pair(*a, *b) for a, b in combinations(row.items(), 2)}
        rows.append({name: table[name][row[name]] for name in names})
    return rows


def mixed_rows(table: Table, rng: random.Random) -> list[dict[str, Any]]:
    """Rows in which each value of each parameter occurs, as few as the longest list has values."""
    shuffled = {name: rng.sample(list(values), len(values)) for name, values in table.items()}
    return [
        {name: values[number % len(values)] for name, values in shuffled.items()}
        for number in range(max(map(len, shuffled.values())))
    ]
