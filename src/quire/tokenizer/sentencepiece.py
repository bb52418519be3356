"""Sentencepiece vocabularies (`tokenizer.model`, GGUF) as `tokenizer.json`.

With the result, the `tokenizers` library tokenises as sentencepiece does: either with its BPE,
given one merge for each way to split a piece in two, ranked by the piece's score, or with its
Unigram. Whitespace becomes ▁. The output is JSON, so neither sentencepiece nor `tokenizers` is
needed.

If a text contains special tokens, each part between them is treated as the beginning of a text (as
in transformers' legacy mode), unless the configuration says `"legacy": false`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from quire.tokenizer.protobuf import NotAMessage, fields

SPACE: Final = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces; GGUF uses the same numbers."""
UNIGRAM, BPE = 1, 2
MAX_PIECES: Final = 2**22


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary; its index is its id."""

    text: str
    score: float = 0.0
    type: int = NORMAL


@dataclass(slots=True)
class PieceModel:
    """A vocabulary, and how text is normalised for it."""

    pieces: list[Piece] = field(default_factory=list)
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    charsmap: bytes = b""
    """Compiled normalisation (NFKC and the like); empty for none."""
    dummy_prefix: bool = True
    """Whether a space is put before every text."""
    trims_spaces: bool = True
    """Whether spaces at the ends are removed and runs of spaces become one."""


def read_model(data: bytes) -> PieceModel:
    """Read a `tokenizer.model`.

    Raises:
        NotAMessage: it is not such a file.
    """
    model = PieceModel()
    for number, value in fields(data):
        if number == 1:
            model.pieces.append(_piece(value))
        elif number == 2:
            trainer = dict(fields(value))
            model.model_type = trainer.get(3, UNIGRAM)
            model.byte_fallback = bool(trainer.get(35, 0))
        elif number == 3:
            normalizer = dict(fields(value))
            model.charsmap = normalizer.get(2, b"")
            model.dummy_prefix = bool(normalizer.get(3, 1))
            model.trims_spaces = bool(normalizer.get(4, 1))
    if not model.pieces or len(model.pieces) > MAX_PIECES:
        raise NotAMessage(f"it has {len(model.pieces)} pieces")
    if not isinstance(model.charsmap, bytes):
        raise NotAMessage("its map of characters is a number")
    if model.model_type not in (UNIGRAM, BPE):
        raise NotAMessage("its model is neither BPE nor unigram")
    return model


def _piece(data: object) -> Piece:
    found = dict(fields(data))
    text, score = found.get(1, b""), found.get(2, 0.0)
    if not isinstance(text, bytes) or not isinstance(score, float):
        raise NotAMessage("a piece has no text")
    return Piece(text.decode("utf-8", "replace"), score, found.get(3, NORMAL))


def to_json(
    model: PieceModel, config: dict[str, Any], added: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """The `tokenizer.json` of a vocabulary; `config` is `tokenizer_config.json`.

    `added` are tokens beyond the vocabulary, as in `added_tokens`, with their ids.
    """
    tokens = [_added(i, p) for i, p in enumerate(model.pieces) if p.type in _ADDED]
    known = {token["content"] for token in tokens}
    tokens += [token for token in added if token["content"] not in known]
    user_defined = any(piece.type == USER_DEFINED for piece in model.pieces)
    once = model.dummy_prefix and (config.get("legacy") is False or user_defined)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(tokens, key=lambda token: int(token["id"])),
        "normalizer": {"type": "Sequence", "normalizers": list(_normalizers(model, once))},
        "pre_tokenizer": _metaspace() if once else None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": list(_decoders(model))},
        "model": _bpe(model, tokens) if model.model_type == BPE else _unigram(model, tokens),
    }


_ADDED: Final = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
"""Types of pieces at which text is split first, and whether they are special."""


def _added(number: int, piece: Piece) -> dict[str, Any]:
    return added_token(number, piece.text, special=_ADDED[piece.type])


def added_token(number: int, text: str, *, special: bool) -> dict[str, Any]:
    """An entry of `added_tokens` that matches its text exactly."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": special}


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _normalizers(model: PieceModel, once: bool) -> Iterator[dict[str, Any]]:
    if model.charsmap:
        text = base64.b64encode(model.charsmap).decode("ascii")
        yield {"type": "Precompiled", "precompiled_charsmap": text}
    if model.trims_spaces:
        yield _replace({"Regex": "^ +| +$"}, "")
        yield _replace({"Regex": " {2,}"}, " ")
    if model.dummy_prefix and not once:
        yield {"type": "Prepend", "prepend": SPACE}
    yield _replace({"String": " "}, SPACE)


def _metaspace() -> dict[str, Any]:
    return {
        "type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False
    }  # fmt: skip


def _decoders(model: PieceModel) -> Iterator[dict[str, Any]]:
    yield _replace({"String": SPACE}, " ")
    yield {"type": "ByteFallback"}
    yield {"type": "Fuse"}
    if model.dummy_prefix:
        # Who trims spaces before encoding drops all at the beginning when decoding.
        spaces = 2**16 if model.trims_spaces else 1
        yield {"type": "Strip", "content": " ", "start": spaces, "stop": 0}


def _bpe(model: PieceModel, added: Sequence[dict[str, Any]]) -> dict[str, Any]:
    vocab = {piece.text: i for i, piece in reversed(list(enumerate(model.pieces)))}
    vocab |= {t["content"]: t["id"] for t in added if t["content"] not in vocab}
    unknown = next((p.text for p in model.pieces if p.type == UNKNOWN), None)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": _merges(model.pieces),
    }


def _merges(pieces: Sequence[Piece]) -> list[list[str]]:
    """All ways to build a piece from two others, best score first."""
    usable = {p.text: i for i, p in enumerate(pieces) if p.type in (NORMAL, USER_DEFINED, UNUSED)}
    found = []
    for text, number in usable.items():
        for cut in range(1, len(text)):
            left, right = usable.get(text[:cut]), usable.get(text[cut:])
            if left is not None and right is not None:
                found.append((-pieces[number].score, number, left, right))
    return [[pieces[left].text, pieces[right].text] for _, _, left, right in sorted(found)]


def _unigram(model: PieceModel, added: Sequence[dict[str, Any]]) -> dict[str, Any]:
    vocab: list[list[Any]] = [[piece.text, piece.score] for piece in model.pieces]
    lowest = min(score for _, score in vocab)
    for token in sorted(added, key=lambda token: int(token["id"])):
        while len(vocab) < token["id"]:
            vocab.append([f"\0unused {len(vocab)}", lowest])
        if len(vocab) == token["id"]:
            vocab.append([token["content"], lowest])
    unknown = next((i for i, p in enumerate(model.pieces) if p.type == UNKNOWN), None)
    return {
        "type": "Unigram",
        "unk_id": unknown,
        "vocab": vocab,
        "byte_fallback": model.byte_fallback,
    }
