"""How often each token stands in a growing output, kept up instead of counted anew each step.

Still a pure function of prompt and output: the counter only remembers how far it has read.
"""

from __future__ import annotations

import numpy as np


class TokenCounts:
    """Distinct tokens of prompt and output, with their number in the output.

    Args:
        prompt_ids: Distinct prompt tokens that count as seen (number 0 while not in the output).
        vocab_size: Tokens outside the vocabulary are left out.
    """

    __slots__ = ("_counts", "_ids", "_num_read", "_place", "_vocab_size")

    def __init__(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._place = {token: i for i, token in enumerate(prompt_ids.tolist())}
        self._ids = np.zeros(len(prompt_ids) + 64, dtype=np.int64)
        self._ids[: len(prompt_ids)] = prompt_ids
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._num_read = 0
        self._vocab_size = vocab_size

    def follow(self, output: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read on to the end of the output.

        Args:
            output: Output token ids; what was read before must not have changed.

        Returns:
            Distinct ids (int64) and their numbers in the output (float32), as views.
        """
        for token in output[self._num_read :].tolist():
            if 0 <= token < self._vocab_size:
                place = self._place_of(token)  # first: it may put a larger array in place
                self._counts[place] += 1.0
        self._num_read = len(output)
        return self._ids[: len(self._place)], self._counts[: len(self._place)]

    def _place_of(self, token: int) -> int:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
        return place
