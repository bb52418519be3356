"""Masks over the vocabulary: which tokens may come next, as a grammar says it.

A mask is packed, 32 tokens to a word: bit `i % 32` of word `i // 32` allows token `i`. Grammar
engines (llguidance, XGrammar) write it so. For 152,000 tokens it is 19 KB where one byte each would
be 152, and the kernel that applies it reads bits. Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np


class TokenMask(Protocol):
    """Which tokens a request may get: a pure function of its output so far."""

    def allowed(self, output: np.ndarray) -> np.ndarray | None:
        """The mask at the end of an output.

        Asked again for the same output if a step is tried again, and with drafts for several
        outputs in one step, of which each is the one before and one token more that its mask
        allowed. So keep no state that only moves forward.

        Args:
            output: int32 `[n]`, output token ids so far.

        Returns:
            int32 or uint32 `[ceil(vocab / 32)]`, which the next call may overwrite; `None`: every
            token is allowed.

        Raises:
            GrammarFailed: it cannot be said. The request fails alone.
        """
        ...


@runtime_checkable
class AskedMask(TokenMask, Protocol):
    """A mask that can also be asked about one token, which may take far less time than to make it.

    The token that is picked without a mask is most often one that the mask allows, because models
    follow their form. It is then the one that would have been picked with it, if some others are
    allowed, too: the likeliest, to which all weights are relative, and with top-k and top-p those
    that take part in the race.
    """

    asked_first: bool
    """Whether a mask takes so long to make that it is better to pick first and then to ask."""

    def permits(self, output: np.ndarray, tokens: Iterable[int]) -> bool:
        """Whether the mask at the end of an output allows all of some tokens.

        Raises:
            GrammarFailed: see `allowed`.
        """
        ...

    @staticmethod
    def make_together(asked: Sequence[tuple[AskedMask, np.ndarray]]) -> None:
        """Make the masks of several requests at once, for `allowed` to find."""
        ...


def copy_words(words: np.ndarray, into: np.ndarray, vocab_size: int) -> None:
    """Copy a mask over `vocab_size` tokens; `into` is int32.

    Raises:
        ValueError: the mask is made for another vocabulary.
    """
    if words.shape != into.shape:
        raise ValueError(
            f"a mask over {vocab_size} tokens has {len(into)} words, got {words.shape}"
        )
    into[:] = words.view(np.int32)


def permits(words: np.ndarray | None, token: int) -> bool:
    """Whether a mask allows a token; one outside the vocabulary is never allowed."""
    if words is None:
        return True
    return 0 <= token < 32 * len(words) and bool(int(words[token // 32]) >> (token % 32) & 1)
