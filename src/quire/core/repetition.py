"""Whether an output ends with a pattern that is there several times in a row.

The last `size * count` tokens are a pattern of `size` tokens, `count` times, exactly if each of the
last `size * (count - 1)` tokens equals the one `size` before it. So it is enough to know, for each
size, how many tokens in a row have done so. A new token makes these numbers from those before it,
with at most `max_pattern_size` comparisons, of which the search for equal tokens is one call.

The numbers are a function of the output, kept between two tokens. Whoever asks about another output
(a step was undone, a request came back from a journal) gets them made anew. Knows no status.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.repetition import RepetitionDetectionParams


class RepetitionWatch:
    """Watches one output.

    Args:
        params: What counts as a repetition.
        start: Where the output begins in the tokens of the request.
    """

    __slots__ = ("_longest", "_repeats", "_runs", "_seen", "_shortest", "_start")

    def __init__(self, params: RepetitionDetectionParams, start: int) -> None:
        self._shortest = max(1, params.min_pattern_size)
        self._longest = params.max_pattern_size
        self._repeats = params.min_count - 1
        self._start = start
        self._seen = start
        """Tokens that `_runs` is about."""
        self._runs: dict[int, int] = {}
        """By size: how many tokens at the end equal the one `size` before; only if any does."""

    def is_repeating(self, tokens: list[int]) -> bool:
        """Whether the output ends with a repetition.

        Args:
            tokens: Of the request: its prompt, then at least one output token.
        """
        last = len(tokens) - 1
        if self._seen != last:
            # Earlier tokens than these cannot count.
            first = max(self._start, len(tokens) - self._longest * self._repeats)
            self._runs = {}
            for end in range(first, last):
                self._runs = self._longer(tokens, end)
        self._runs = self._longer(tokens, last)
        self._seen = last + 1
        return any(run >= size * self._repeats for size, run in self._runs.items())

    def _longer(self, tokens: list[int], end: int) -> dict[int, int]:
        """`_runs` with the token at `end`."""
        known = self._runs
        return {size: known.get(size, 0) + 1 for size in self._distances(tokens, end)}

    def _distances(self, tokens: list[int], end: int) -> Iterator[int]:
        """The sizes by which the token at `end` has an equal before it."""
        token, at = tokens[end], max(self._start, end - self._longest)
        stop = end - self._shortest + 1
        try:
            while at < stop:
                at = tokens.index(token, at, stop) + 1
                yield end - at + 1
        except ValueError:  # none is left
            return
