"""The decode steps of one request, stored compactly, and the choice of those that get their own
span.

10,000 tokens take 10,000 steps, and nobody can read a trace with a span for each. So beyond
`MAX_SPANS`, or on demand, only slow steps get their own span, and each run of others is combined
into one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from quire.observability.traces.spans import Alike

MAX_SPANS: Final = 1000
"""Largest number of decode spans of one completion."""
NEIGHBOURS: Final = 64
"""Size of the groups of consecutive steps within which a step is compared with the others."""
QUANTILE: Final = 0.95


class Mark(msgspec.Struct, gc=False):
    """One engine step, for all requests that it gave tokens to."""

    step: int
    end: float
    requests: int
    """In the batch."""
    alike: Alike | None = None
    """What the spans of this step have in common, once the first was made."""


class Stretch(msgspec.Struct, frozen=True, gc=False):
    """Consecutive decode steps that are shown as one span."""

    start: float
    first: Mark
    last: Mark
    count: int
    tokens: int
    longest: float
    """Seconds of the slowest step in it."""
    slow: bool


class DecodeRun:
    """Decode steps of one request that follow one another with nothing in between.

    Args:
        start: When the event before ended.
    """

    __slots__ = ("_marks", "_tokens", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        self._marks: list[Mark] = []
        self._tokens = array("i")

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, mark: Mark, tokens: int) -> None:
        """One step gave the request `tokens`."""
        self._marks.append(mark)
        self._tokens.append(tokens)

    def cut(self, limit: float) -> None:
        """Drop the steps that ended after `limit`: the caller never got their tokens."""
        while self._marks and self._marks[-1].end > limit:
            self._marks.pop()
            self._tokens.pop()

    @property
    def end(self) -> float:
        """When the last step ended."""
        return self._marks[-1].end if self._marks else self.start

    def durations(self) -> list[float]:
        """Seconds from the previous event to the end of each step: how long the caller waited for
        it."""
        ends = [mark.end for mark in self._marks]
        return [end - before for before, end in zip((self.start, *ends), ends, strict=False)]

    def stretches(self, mode: str, room: int = MAX_SPANS) -> Iterator[Stretch]:
        """The steps as spans. Each has its own if `mode` is `all` and there is room; otherwise only
        slow steps do (`slow`) or none (`none`), and the steps between them are combined.

        Args:
            mode: `all`, `slow` or `none`.
            room: Largest number of spans; at least 1.
        """
        seconds = self.durations()
        slow = set(slow_ones(seconds)) if mode != "none" else set()
        if mode == "all" and len(self) <= room:
            single: set[int] = set(range(len(self)))
        else:
            # Each step with a span of its own may need a second span, for the steps before it; and
            # the steps after the last one need one. That is at most 2 * singles + 1 spans.
            single = set(sorted(slow, key=lambda i: -seconds[i])[: (room - 1) // 2])
        first = 0
        for index in range(len(self)):
            if index in single:
                if first < index:
                    yield self._together(first, index, seconds)
                yield self._single(index, seconds, index in slow)
                first = index + 1
        if first < len(self):
            yield self._together(first, len(self), seconds)

    def _single(self, i: int, seconds: Sequence[float], slow: bool) -> Stretch:
        """One step; a server that traces everything makes one of these per token."""
        mark = self._marks[i]
        start = self._marks[i - 1].end if i else self.start
        return Stretch(start, mark, mark, 1, self._tokens[i], seconds[i], slow)

    def _together(self, first: int, end: int, seconds: Sequence[float]) -> Stretch:
        return Stretch(
            start=self._marks[first - 1].end if first else self.start,
            first=self._marks[first],
            last=self._marks[end - 1],
            count=end - first,
            tokens=sum(self._tokens[first:end]),
            longest=max(seconds[first:end]),
            slow=False,
        )


def slow_ones(seconds: Sequence[float]) -> Iterator[int]:
    """Indices of the values larger than 95 % of their neighbours, the other values in their group
    of 64."""
    for first in range(0, len(seconds), NEIGHBOURS):
        group = seconds[first : first + NEIGHBOURS]
        if len(group) < 2:
            continue
        limit = quantile_of_others(sorted(group))
        yield from (first + i for i, value in enumerate(group) if value > limit)


def quantile_of_others(ordered: Sequence[float]) -> float:
    """The value that one must exceed to lie above the 95th percentile (nearest rank) of the
    others."""
    return ordered[math.ceil(QUANTILE * (len(ordered) - 1)) - 1]
