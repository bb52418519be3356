"""How long a step should take, by what it holds: a model fitted to the steps of this run.

`seconds = a + b tokens + c rows + d attended`, none of them negative. Steps of about the same size
(powers of two of tokens and of attended tokens) are averaged into one record, so that thousands of
decode steps do not outweigh a few long prompts. The fit is computed only when somebody asks, which
is when a step takes long. Knows no clock and no core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

RATE: Final = 0.1
"""Share of a new step in the average of its kind, so that the model follows the machine."""
OUTLIER: Final = 4.0
"""A step counts as at most so many times the average of its kind: one during which the machine
was suspended says nothing about others."""
REACH: Final = 2.0
"""Steps up to so many times as large as the largest one seen are predicted by the fit alone."""
LONGEST_GUESS: Final = 120.0
"""Seconds. No step that is larger than all before is expected to take longer, unless the fit says
so."""
SWEEPS: Final = 200


class StepTimes:
    """Learns from steps and predicts others."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Steps learned from."""
        self._kinds: dict[int, list[float]] = {}
        # tokens, rows, attended tokens and seconds of an average step, and how many there were
        self._largest = [0, 0, 0]

    def add(self, tokens: int, rows: int, attended: int, seconds: float) -> None:
        """Learn from a step that has ended.

        Args:
            tokens, rows, attended: What it held; see `Beat`.
            seconds: How long it took.
        """
        key = tokens.bit_length() << 8 | attended.bit_length()
        kind = self._kinds.get(key)
        self.num_steps += 1
        if kind is None:
            self._kinds[key] = [tokens, rows, attended, seconds, 1]
            self._largest = [
                max(p) for p in zip(self._largest, (tokens, rows, attended), strict=True)
            ]
            return
        kind[4] += 1
        if kind[4] > 1 / RATE:
            share, seconds = RATE, min(seconds, OUTLIER * kind[3])
        else:
            share = 1 / kind[4]
        # A linear model that holds for steps holds for their average.
        kind[0] += share * (tokens - kind[0])
        kind[1] += share * (rows - kind[1])
        kind[2] += share * (attended - kind[2])
        kind[3] += share * (seconds - kind[3])

    def predict(self, tokens: int, rows: int, attended: int) -> float | None:
        """Seconds that a step should take; `None` before any has ended."""
        if not self._kinds:
            return None
        shape = (tokens, rows, attended)
        fitted = sum(c * f for c, f in zip(self._fit(), (1, *shape), strict=True))
        kind = self._kinds.get(tokens.bit_length() << 8 | attended.bit_length())
        if kind is not None:
            fitted = max(fitted, kind[3])
        if all(n <= REACH * most for n, most in zip(shape, self._largest, strict=True)):
            return fitted
        # What no step has shown, the fit cannot know (decodes say nothing of attention over long
        # prompts). But no term grows faster than what it counts, so every kind is a bound.
        bound = min(k[3] * _times_larger(shape, k) for k in self._kinds.values())
        return max(fitted, min(bound, LONGEST_GUESS))

    def _fit(self) -> list[float]:
        """Least squares of the relative errors without negative terms, one term after the other."""
        rows = [(f, [x / f[3] for x in (1.0, *f[:3])]) for f in self._kinds.values() if f[3] > 0]
        columns = [[row[i] for _, row in rows] for i in range(4)]
        squares = [sum(x * x for x in column) for column in columns]
        terms, left = [0.0] * 4, [1.0] * len(rows)
        for _ in range(SWEEPS):
            # Tokens first: where they cannot be told from rows, they stand for both, and a long
            # prompt is not taken for a single row.
            for i in (1, 3, 2, 0):
                if not squares[i]:
                    continue
                column = columns[i]
                step = sum(x * y for x, y in zip(column, left, strict=True)) / squares[i]
                step = max(step, -terms[i])
                terms[i] += step
                left = [y - step * x for x, y in zip(column, left, strict=True)]
        return terms


def _times_larger(shape: Sequence[int], kind: Sequence[float]) -> float:
    """How many times as large a step is, by what has grown most."""
    return max(1.0, *(n / max(1.0, seen) for n, seen in zip(shape, kind, strict=False)))
