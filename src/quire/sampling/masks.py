"""Masks over the vocabulary: which tokens may come next, as a grammar says it.

A mask is packed, 32 tokens to a word: bit `i % 32` of word `i // 32` allows token `i`. Grammar
engines (llguidance, XGrammar) write it so. For 152,000 tokens it is 19 KB where one byte each would
be 152, and it unpacks in some 20 microseconds where it is used. Knows no grammar.
"""

from __future__ import annotations

from typing import Final, Protocol

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
            int32 or uint32 `[ceil(vocab / 32)]`; `None`: every token is allowed.

        Raises:
            GrammarFailed: it cannot be said. The request fails alone.
        """
        ...


_NEVER_OR_NOTHING: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
    np.float32(-0.0),
    np.float32(-np.inf),
)
"""For each byte of a mask what is added to the logits of its eight tokens. -0.0 changes no
number."""


def addends(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """What to add to a row of logits so that only allowed tokens remain: float32 `[vocab_size]`.

    Filling the logits by a mask of booleans is slower by an order of magnitude, since the processor
    cannot foresee which are filled.

    Raises:
        ValueError: the mask is made for another vocabulary.
    """
    octets = _octets(words, vocab_size)
    out = np.empty((len(octets), 8), np.float32)
    np.take(_NEVER_OR_NOTHING, octets, axis=0, out=out, mode="clip")
    return out.reshape(-1)[:vocab_size]


def unpack(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """A mask as one bool per token, `[vocab_size]`.

    Raises:
        ValueError: it is made for another vocabulary.
    """
    octets = _octets(words, vocab_size)
    return np.unpackbits(octets, count=vocab_size, bitorder="little").view(np.bool_)


def _octets(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """The bytes of a mask, in the order of the tokens whatever the machine's byte order is."""
    if words.shape != (-(-vocab_size // 32),):
        raise ValueError(
            f"a mask over {vocab_size} tokens has {-(-vocab_size // 32)} words, got {words.shape}"
        )
    little = np.ascontiguousarray(words, dtype="<u4" if words.dtype.kind == "u" else "<i4")
    return little.view(np.uint8)


def permits(words: np.ndarray | None, token: int) -> bool:
    """Whether a mask allows a token; one outside the vocabulary is never allowed."""
    if words is None:
        return True
    return 0 <= token < 32 * len(words) and bool(int(words[token // 32]) >> (token % 32) & 1)
