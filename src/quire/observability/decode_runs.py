"""The decode steps of one request, compactly, and which of them a trace shows one by one.

10,000 tokens are 10,000 steps. A trace that shows each is of no use, so beyond `MAX_SPANS`, or on
demand, only the slow ones are shown and the others come together in one span per stretch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

MAX_SPANS: Final = 1000
"""Decode spans of one completion."""
NEIGHBOURS: Final = 64
"""A step is compared with the others of its group of so many consecutive steps."""
QUANTILE: Final = 0.95


class Stretch(msgspec.Struct, frozen=True, gc=False):
    """Consecutive decode steps that are shown as one span."""

    start: float
    end: float
    first_step: int
    last_step: int
    count: int
    tokens: int
    requests: int
    """Requests in the batch, of the last step."""
    longest: float
    """Seconds of the slowest step in it."""
    slow: bool


class DecodeRun:
    """Decode steps of one request without anything else in between.

    Args:
        start: When the event before ended.
    """

    __slots__ = ("_ends", "_requests", "_steps", "_tokens", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        self._steps = array("q")
        self._ends = array("d")
        self._tokens = array("i")
        self._requests = array("i")

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, end: float, tokens: int, requests: int) -> None:
        """One step gave the request `tokens`, in a batch of `requests`."""
        self._steps.append(step)
        self._ends.append(end)
        self._tokens.append(tokens)
        self._requests.append(requests)

    def cut(self, limit: float) -> None:
        """Forget the steps that ended after `limit`: nobody got their tokens."""
        while self._ends and self._ends[-1] > limit:
            for column in (self._steps, self._ends, self._tokens, self._requests):
                column.pop()

    @property
    def end(self) -> float:
        """When the last step ended."""
        return self._ends[-1] if self._ends else self.start

    def durations(self) -> list[float]:
        """From the event before to the end of each step: what the caller waited for it."""
        ends = self._ends
        return [ends[i] - (ends[i - 1] if i else self.start) for i in range(len(ends))]

    def stretches(self, mode: str, room: int = MAX_SPANS) -> Iterator[Stretch]:
        """The steps as spans: each its own if `mode` is `all` and there is room; else the slow
        ones (`slow`) or none (`none`), and what lies between them together.

        Args:
            mode: `all`, `slow` or `none`.
            room: Most spans; at least 1.
        """
        seconds = self.durations()
        slow = set(slow_ones(seconds)) if mode != "none" else set()
        if mode == "all" and len(self) <= room:
            single: set[int] = set(range(len(self)))
        else:
            # Each shown step may need one more span for what comes before it.
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
        end, took, step = self._ends[i], seconds[i], self._steps[i]
        start = self._ends[i - 1] if i else self.start
        return Stretch(start, end, step, step, 1, self._tokens[i], self._requests[i], took, slow)

    def _together(self, first: int, end: int, seconds: Sequence[float]) -> Stretch:
        return Stretch(
            start=self._ends[first - 1] if first else self.start,
            end=self._ends[end - 1],
            first_step=self._steps[first],
            last_step=self._steps[end - 1],
            count=end - first,
            tokens=sum(self._tokens[first:end]),
            requests=self._requests[end - 1],
            longest=max(seconds[first:end]),
            slow=False,
        )


def slow_ones(seconds: Sequence[float]) -> Iterator[int]:
    """Indices of what took longer than 95 % of its neighbours: the others of its group of 64."""
    for first in range(0, len(seconds), NEIGHBOURS):
        group = seconds[first : first + NEIGHBOURS]
        if len(group) < 2:
            continue
        limit = quantile_of_others(sorted(group))
        yield from (first + i for i, value in enumerate(group) if value > limit)


def quantile_of_others(ordered: Sequence[float]) -> float:
    """What a value must exceed to lie beyond the 95th percentile (nearest rank) of the others."""
    return ordered[math.ceil(QUANTILE * (len(ordered) - 1)) - 1]
