"""Vocabularies for grammars: the embedded model's, a small one over few letters, a large one."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import quire
from quire.params import StructuredOutputsParams
from quire.structured.compiler import Vocabulary
from quire.structured.settle import unforced
from quire.structured.state import GrammarState

DEMO = Path(quire.__file__).parent / "assets" / "quire-demo" / "tokenizer.json"
END = 0
"""The end-of-sequence token of all of them."""


@functools.cache
def demo() -> Vocabulary:
    """The embedded model's."""
    return Vocabulary(DEMO.read_text("utf-8"), 2048, [END])


def letters(words: Sequence[str]) -> Vocabulary:
    """The end-of-sequence token, and these tokens after it."""
    vocab = {"<end>": END, **{word: i for i, word in enumerate(words, 1)}}
    return Vocabulary(json.dumps(description(vocab, [])), len(vocab), [END])


def description(vocab: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    """A byte-level tokenizer, as in `tokenizer.json`."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False}  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": END, "content": "<end>", "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True}
        ],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }  # fmt: skip


@functools.cache
def large(size: int = 151_936) -> Vocabulary:
    """The vocabulary of `large_tokenizer`."""
    return Vocabulary(large_tokenizer(size), size, [END])


@functools.cache
def large_tokenizer(size: int = 151_936) -> str:
    """A `tokenizer.json` of the embedded model's tokens, and random concatenations of them."""
    rng, read = random.Random(0), json.loads(DEMO.read_text("utf-8"))
    vocab, merges = read["model"]["vocab"], read["model"]["merges"]
    parts = [t for t in vocab if len(t) < 8 and not t.startswith("<")]
    while len(vocab) < size:
        left, right = rng.choice(parts), rng.choice(parts)
        if "Ġ" not in right and left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
            if len(left + right) < 8:
                parts.append(left + right)
    return json.dumps(read)


def state(vocabulary: Vocabulary, forces: bool = True, **wanted: Any) -> GrammarState:
    """A request at the beginning of a grammar."""
    grammar = vocabulary.settle(StructuredOutputsParams(**wanted))
    if not forces:
        grammar = unforced(grammar)
    return GrammarState(vocabulary.compile(grammar), vocabulary, forces)


def allowed_ids(found: GrammarState, output: Sequence[int]) -> list[int]:
    """The tokens that may follow an output."""
    words = found.allowed(np.array(output, np.int32))
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    ids: list[int] = bits.nonzero()[0].tolist()
    return ids
