"""Masks over the vocabulary: which tokens may come next, as a grammar says it.

A mask is packed, 32 tokens to a word: bit `i % 32` of word `i // 32` allows token `i`. Grammar
engines (llguidance, XGrammar) write it so. For 152,000 tokens it is 19 KB where one byte each would
be 152, and it unpacks in some 20 microseconds where it is used. Knows no grammar.
"""

from __future__ import annotations

from typing import Protocol

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
        """
        ...


def unpack(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """A mask as one bool per token, `[vocab_size]`.

    Raises:
        ValueError: it is made for another vocabulary.
    """
    if words.shape != (-(-vocab_size // 32),):
        raise ValueError(
            f"a mask over {vocab_size} tokens has {-(-vocab_size // 32)} words, got {words.shape}"
        )
    # Bytes of little-endian words are in the order of the tokens, whatever the machine's own is.
    octets = np.ascontiguousarray(words, dtype="<u4" if words.dtype.kind == "u" else "<i4")
    bits = np.unpackbits(octets.view(np.uint8), count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def permits(words: np.ndarray | None, token: int) -> bool:
    """Whether a mask allows a token; one outside the vocabulary is never allowed."""
    if words is None:
        return True
    return 0 <= token < 32 * len(words) and bool(int(words[token // 32]) >> (token % 32) & 1)
