"""Encodes texts and pairs of texts and truncates them to a number of tokens, keeping all special
tokens.

Works on objects of the `tokenizers` library that it is given, without importing the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import tokenizers

LONG_TEXT: Final = 512
"""Number of characters beyond which encoding takes more than a few tenths of a millisecond."""


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """Token ids of two texts as one prompt."""

    ids: list[int]
    split: int | None
    """Index of the first token of type 1 (the second text); `None` if the model has no token
    types."""


def encode_alone(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool
) -> tokenizers.Encoding:
    """The library's encoding of one text, for its ids.

    A long text goes through the call for batches, because the call for single texts lets no other
    thread run: several megabytes take seconds, and so do thousands of shorter texts.
    """
    if len(text) <= LONG_TEXT:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def encode_within(
    backend: tokenizers.Tokenizer, text: str, max_tokens: int, side: str, special: bool
) -> list[int]:
    """Token ids of a text, at most `max_tokens`; `side` is where it is truncated."""
    encoding = encode_alone(backend, text, False)
    around = backend.num_special_tokens_to_add(False) if special else 0
    _cut(encoding, max_tokens - around, side)
    ids: list[int] = backend.post_process(encoding, None, special).ids
    return ids[:max_tokens]  # the special tokens alone may be too many


def encode_pair(
    backend: tokenizers.Tokenizer,
    first: str,
    second: str,
    max_tokens: int | None,
    max_first: int | None,
    max_second: int | None,
) -> EncodedPair:
    """Two texts with the special tokens that the tokenizer puts around pairs.

    Args:
        max_tokens: Limit of the whole. The second text is truncated, and the first one only if it
            alone is too long. `None`: no limit.
        max_first, max_second: Limits of the two texts.
    """
    one = encode_alone(backend, first, False)
    two = encode_alone(backend, second, False)
    if max_first is not None:
        _cut(one, max_first, "right")
    if max_second is not None:
        _cut(two, max_second, "right")
    if max_tokens is not None:
        room = max_tokens - backend.num_special_tokens_to_add(True)
        _cut(one, room, "right")
        _cut(two, room - len(one.ids), "right")
    pair = backend.post_process(one, two, True)
    ids, types = pair.ids[:max_tokens], pair.type_ids[:max_tokens]
    return EncodedPair(ids, types.index(1) if 1 in types else None)


def _cut(encoding: tokenizers.Encoding, length: int, side: str) -> None:
    if len(encoding.ids) > length:
        encoding.truncate(max(0, length), direction=side)
