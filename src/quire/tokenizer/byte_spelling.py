"""How the tokens of a vocabulary spell bytes.

In most tokenizers of language models every token stands for a fixed byte string, and the text is
the concatenation of these, read as UTF-8. Then decoding token by token gives the same as decoding
all tokens at once, at constant cost per token. `byte_spelling` recognises such tokenizers by the
description of their decoder; for the others (WordPiece and the like) there is no such table.

Knows the JSON description of decoders, but not the `tokenizers` library, and keeps no state.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class ByteSpelling:
    """A decoder in which every token is a byte string."""

    spell: Callable[[str], bytes]
    """Bytes of a token, given its entry in the vocabulary."""
    leading_spaces: int = 0
    """Number of spaces removed from the very start of a text (SentencePiece puts one there)."""


def byte_spelling(decoder: dict[str, Any] | None) -> ByteSpelling | None:
    """The spelling rule of a decoder, described as in `tokenizer.json`, if its tokens are byte
    strings."""
    if decoder is None:
        return None
    steps = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return ByteSpelling(_spell_byte_level)
    return _sentencepiece(steps, kinds)


def _sentencepiece(steps: list[dict[str, Any]], kinds: list[Any]) -> ByteSpelling | None:
    """The rule for SentencePiece's decoders: Replace* ByteFallback Fuse Strip?, if only plain
    strings are replaced and only spaces stripped."""
    count = kinds.index("ByteFallback") if "ByteFallback" in kinds else -1
    rest = steps[count + 1 :]
    if count < 0 or set(kinds[:count]) - {"Replace"} or not rest or kinds[count + 1] != "Fuse":
        return None
    replacements = [
        (step.get("pattern", {}).get("String"), step["content"]) for step in steps[:count]
    ]
    if any(not isinstance(old, str) for old, _ in replacements):
        return None
    strip: dict[str, Any] = (
        rest[1] if len(rest) == 2 else {"type": "Strip", "content": " ", "start": 0, "stop": 0}
    )
    if len(rest) > 2 or strip.get("type") != "Strip" or strip["content"] != " " or strip["stop"]:
        return None
    return ByteSpelling(_sentencepiece_speller(replacements), int(strip["start"]))


def _sentencepiece_speller(replacements: list[tuple[Any, str]]) -> Callable[[str], bytes]:
    def spell(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.encode("utf-8")

    return spell


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 is itself, the other 68 bytes take
    the code points from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()
BYTE_TO_CHAR = {byte: char for char, byte in _ALPHABET.items()}
"""GPT-2's printable stand-in for each byte."""


def _spell_byte_level(token: str) -> bytes:
    try:
        return bytes(map(_ALPHABET.__getitem__, token))
    except KeyError:  # an added token may hold other characters; it stands for its own text
        return token.encode("utf-8")
