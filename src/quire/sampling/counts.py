"""How often each token occurs in a growing output: counted on from step to step, not anew.

The counts stay a pure function of prompt and output: a counter only remembers how far it has read.
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

    def follow_drafts(self, output: np.ndarray, num_drafts: int) -> tuple[np.ndarray, np.ndarray]:
        """`follow` an output whose last tokens are drafts. These are counted in the answer, but not
        remembered: they may turn out wrong.

        Returns:
            As `follow`, as copies.
        """
        ids, counts = self.follow(output[: len(output) - num_drafts])
        drafts = output[len(output) - num_drafts :]
        drafts = drafts[(drafts >= 0) & (drafts < self._vocab_size)]
        new = np.array(sorted({t for t in drafts.tolist() if t not in self._place}), np.int64)
        ids = np.concatenate((ids, new))
        counts = np.concatenate((counts, np.zeros(len(new), np.float32)))
        place = {token: len(self._place) + i for i, token in enumerate(new.tolist())}
        for token in drafts.tolist():
            counts[self._place.get(token, place.get(token))] += 1.0
        return ids, counts

    def _place_of(self, token: int) -> int:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
        return place
