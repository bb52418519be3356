"""Byte-level BPE vocabularies (`.tiktoken`, `vocab.json` with `merges.txt`, GGUF) as
`tokenizer.json`.

A `.tiktoken` file has one token per line: its bytes in base64, and its rank. Tiktoken merges the
neighbours whose concatenation has the lowest rank. The same result comes from a list of merges that
has every way to split each token in two, in order of rank. The pattern that splits a text into
words is not in the file; `PATTERNS` and `FAMILIES` have it. The output is JSON, so no library is
needed.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quire.tokenizer.byte_spelling import BYTE_TO_CHAR

_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS: Final = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": _WORDS.replace("{digits}", r"\p{N}{1,3}"),
    "qwen": _WORDS.replace("{digits}", r"\p{N}"),
}
"""Patterns that split a text into words before merging, by their first well-known user."""


@dataclass(frozen=True, slots=True)
class Family:
    """What a `.tiktoken` file does not say."""

    pattern: str
    special: tuple[str, ...] = ()
    """Special tokens that follow the vocabulary, in order, if the configuration names none."""


FAMILIES: Final[dict[str, Family]] = {
    "QWenTokenizer": Family(
        "qwen",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
    ),
    "ChatGLM4Tokenizer": Family("cl100k"),
}
"""Families by `tokenizer_class`; others are split like cl100k (Llama 3, GLM 4, GPT 4)."""
_LINE = re.compile(rb"([A-Za-z0-9+/]+=*) (\d+)")


def is_tiktoken(data: bytes) -> bool:
    """Whether the beginning of a file looks like a line of a `.tiktoken` file."""
    return bool(_LINE.fullmatch(data[:4096].split(b"\n", 1)[0].rstrip(b"\r")))


def read_tiktoken(data: bytes) -> dict[bytes, int]:
    """Tokens with their ranks.

    Raises:
        ValueError: a line is not a token and a rank.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None and line:
            raise ValueError(f"line {number} is not a token and its rank")
        if match is not None:
            try:
                ranks[base64.b64decode(match[1], validate=True)] = int(match[2])
            except binascii.Error:
                raise ValueError(f"line {number} is not base64") from None
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError("it lacks single bytes")
    return ranks


def tiktoken_json(
    ranks: Mapping[bytes, int], config: Mapping[str, Any], added: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """The `tokenizer.json` of a `.tiktoken` vocabulary."""
    family = FAMILIES.get(str(config.get("tokenizer_class")), Family("cl100k"))
    vocab = {spelled(token): rank for token, rank in ranks.items()}
    found = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None:
                found.append((rank, left, right, cut, token))
    merges = [[spelled(t[:cut]), spelled(t[cut:])] for _, _, _, cut, t in sorted(found)]
    return byte_level_json(vocab, merges, family.pattern, added, whole_words_first=True)


def byte_level_json(
    vocab: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    pattern: str,
    added: Sequence[dict[str, Any]],
    *,
    whole_words_first: bool = False,
) -> dict[str, Any]:
    """`tokenizer.json` for byte-level BPE, with tokens in GPT-2's spelling and a `pattern` from
    `PATTERNS`.

    With `whole_words_first`, a word that is itself a token is not merged from pieces.
    """
    split = {
        "type": "Split", "pattern": {"Regex": PATTERNS[pattern]}, "behavior": "Isolated",
        "invert": False,
    }  # fmt: skip
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False
    }  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: int(token["id"])),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": whole_words_first,
            "vocab": {**vocab, **{t["content"]: t["id"] for t in added}},
            "merges": [list(merge) for merge in merges],
        },
    }


def spelled(token: bytes) -> str:
    """Bytes in GPT-2's printable alphabet."""
    return "".join(map(BYTE_TO_CHAR.__getitem__, token))
