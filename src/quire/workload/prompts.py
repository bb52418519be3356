"""Prompts of an exact number of tokens, made of random ids.

A `Codec` is what a tokenizer offers. Where the target's tokenizer is not at hand, `WordCodec`
stands in: a token is an English word, so lengths are about right, and the server's own counts are
the ones to report. Knows no files and no distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

ROUNDS: Final = 8
"""Attempts at a text that encodes to exactly the length that was asked for."""
CANDIDATES: Final = 4096
"""Ids of the vocabulary that are tried; to try all of a large one takes seconds."""
_WORDS = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
car city community name president team minute idea kid body information back parent face others
level office door health person art war history party result change morning reason research girl
guy moment air teacher force education foot boy age policy music market sense plan college
interest death course someone experience behind control field development
"""
WORDS: Final = tuple(_WORDS.split())
"""Common words, most of them one token for most tokenizers."""


class Codec(Protocol):
    """Text to ids and back; `quire.tokenizer.Tokenizer` is one."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        ...

    @property
    def all_special_ids(self) -> frozenset[int]:
        """Ids that no prompt should hold."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        ...


class WordCodec:
    """A tokenizer for want of a better one: an id is a word of `WORDS`."""

    vocab_size: int = len(WORDS)
    all_special_ids: frozenset[int] = frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A number per word of the text; words that are not in the list share them."""
        return [hash_of(word) for word in text.split()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Words, with a space before each."""
        return "".join(f" {WORDS[i % len(WORDS)]}" for i in ids)


def hash_of(word: str) -> int:
    """A word's place in the list; for others, a number that depends on the word alone."""
    try:
        return WORDS.index(word)
    except ValueError:
        return sum(word.encode()) % len(WORDS)


class PromptMaker:
    """Random texts of exact lengths.

    Args:
        codec: Counts tokens.
        rng: Where randomness comes from.
    """

    def __init__(self, codec: Codec, rng: np.random.Generator) -> None:
        self.codec = codec
        self._rng = rng
        self._usable = _stable_ids(codec, rng)

    def ids(self, num: int) -> list[int]:
        """Random ids without special ones."""
        return self.ids_from(self._rng, num)

    def ids_from(self, rng: np.random.Generator, num: int) -> list[int]:
        """The same from another generator."""
        return [int(i) for i in rng.choice(self._usable, num)]

    def text(self, ids: Sequence[int], length: int | None = None) -> tuple[str, int]:
        """Text of these ids, changed at its end until it encodes to as many tokens.

        Args:
            ids: What it begins with.
            length: Tokens it shall have; without it, as many as there are ids.

        Returns:
            The text, and its length in tokens: nearly always the one asked for.
        """
        wanted = len(ids) if length is None else length
        current = list(ids)[:wanted]
        text = ""
        for _ in range(ROUNDS):
            # Text of random ids often encodes to other ids, and then to more or fewer of them.
            current += self.ids(wanted - len(current))
            text = self.codec.decode(current)
            again = self.codec.encode(text, add_special_tokens=False)
            if len(again) == wanted:
                return text, wanted
            current = again[:wanted]
        return text, len(self.codec.encode(text, add_special_tokens=False))


def _stable_ids(codec: Codec, rng: np.random.Generator) -> np.ndarray:
    """Ids whose text encodes to themselves, as bytes in the middle of a character do not."""
    tried = np.arange(codec.vocab_size)
    if len(tried) > CANDIDATES:
        tried = np.sort(rng.choice(tried, CANDIDATES, replace=False))
    usable = [int(i) for i in tried if int(i) not in codec.all_special_ids]
    stable = [i for i in usable if codec.encode(codec.decode([i]), add_special_tokens=False) == [i]]
    return np.array(stable or usable)
