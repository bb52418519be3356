"""Texts and pairs of texts cut to a number of tokens, with the special tokens left whole.

Works on the library's objects, which it is handed; imports nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import tokenizers

LONG_TEXT: Final = 4096
"""Characters beyond which a text takes a millisecond or more."""


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """Token ids of two texts as one prompt."""

    ids: list[int]
    split: int | None
    """Where the tokens of type 1 (the second text) begin; `None` if the model has no types."""


def encode_alone(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool
) -> tokenizers.Encoding:
    """The library's encoding of one text, for its ids.

    A long text takes the call for batches: the one for single texts lets no other thread run, and
    several megabytes take seconds.
    """
    if len(text) <= LONG_TEXT:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def encode_within(
    backend: tokenizers.Tokenizer, text: str, max_tokens: int, side: str, special: bool
) -> list[int]:
    """Token ids of a text, at most `max_tokens`; `side` is where it is cut."""
    encoding = encode_alone(backend, text, False)
    around = backend.num_special_tokens_to_add(False) if special else 0
    _cut(encoding, max_tokens - around, side)
    ids: list[int] = backend.post_process(encoding, None, special).ids
    return ids[:max_tokens]


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
        max_tokens: Of the whole; the second text is cut, and the first one where it alone is too
            long. `None`: no limit.
        max_first, max_second: Of the texts themselves.
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
