"""How many tokens a model may reason: once its budget is spent, the end of the reasoning is forced.

The reasoning begins with the prompt or where the output has the opening mark, and ends with the
closing mark. All tokens between them count, over all sections of an output. When as many are there
as the budget has, the tokens of the closing mark are forced one after the other, those that the
model has just written left out.

A pure function of the output: what is kept about each position is dropped from where an output
differs from the one before. Knows no text and no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from quire.thinking import Thinking


class _Place(NamedTuple):
    """Where an output stands after some of its tokens."""

    inside: bool
    """Within reasoning."""
    used: int
    """Tokens of reasoning, with those of a closing mark that is not complete."""
    matched: int
    """Tokens of the next mark, closing or opening, with which the output ends."""


_ROOM: Final = 64


class ThinkingBudget:
    """One request that may reason for so many tokens.

    Args:
        marks: Of its model.
        budget: Tokens of reasoning, at least 0.
    """

    def __init__(self, marks: Thinking, budget: int) -> None:
        self._marks = (marks.opening, marks.closing)
        self._back = (_fallbacks(marks.opening), _fallbacks(marks.closing))
        self._budget = budget
        self._places = [_Place(marks.is_open, 0, 0)]
        # after as many tokens of `_seen` as its index says
        self._seen = np.zeros(_ROOM, dtype=np.int32)

    def forced(self, output: np.ndarray) -> int | None:
        """The token that must follow an output, int32 `[n]`; `None`: any may."""
        self._follow(output)
        place = self._places[-1]
        if not place.inside or place.used < self._budget:
            return None
        return self._marks[True][place.matched]

    def _follow(self, output: np.ndarray) -> None:
        known, count = len(self._places) - 1, len(output)
        same = min(known, count)
        if same and not np.array_equal(self._seen[:same], output[:same]):
            same = int((self._seen[:same] != output[:same]).argmax())
        del self._places[same + 1 :]
        if same == count:
            return
        if count > len(self._seen):
            self._seen = np.resize(self._seen, 2 * count)
        self._seen[same:count] = output[same:]
        place = self._places[-1]
        for token in output[same:].tolist():
            place = self._next(place, token)
            self._places.append(place)

    def _next(self, place: _Place, token: int) -> _Place:
        inside, used, matched = place
        mark, back = self._marks[inside], self._back[inside]
        while matched and mark[matched] != token:
            matched = back[matched - 1]
        matched += mark[matched] == token
        used += inside
        if matched < len(mark):
            return _Place(inside, used, matched)
        # The closing mark itself is no reasoning.
        return _Place(not inside, used - len(mark) if inside else used, 0)


def _fallbacks(mark: Sequence[int]) -> list[int]:
    """For each beginning of a mark: the length of the longest shorter one that it ends with, as in
    the search of Knuth, Morris and Pratt."""
    found, length = [0], 0
    for token in mark[1:]:
        while length and mark[length] != token:
            length = found[length - 1]
        length += mark[length] == token
        found.append(length)
    return found
