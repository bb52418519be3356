"""Tokenizer training and packing for quire-demo: documents in, token rows out.

It knows the `tokenizers` library's format and how documents are laid into rows of one
length.  It does not know what the documents say, and it needs numpy, not torch.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import demo_facts as facts
from demo_chat import END, MARKER_TOKENS, SPECIAL_TOKENS
from demo_corpus import Doc, documents

VOCAB_SIZE = 2048


def train_tokenizer(seed: int, size: int = VOCAB_SIZE, sample: int = 12000) -> Tokenizer:
    """Byte-level BPE over corpus documents; every digit stays a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL_TOKENS, *MARKER_TOKENS],
        # The whole byte alphabet, so that any text round trips.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made = islice(documents(random.Random(f"{seed}/tokenizer")), sample)
    markers = re.compile("|".join(map(re.escape, (*SPECIAL_TOKENS, *MARKER_TOKENS))))
    # The markers are tokens already; no merge may be spent on their letters.
    texts = (markers.sub("\n", "".join(t for t, _ in doc)) for doc in made)
    # A word that opens an answer has no space before it; it is to be one token there too.
    bare = ["\n".join((*facts.WORDS, *facts.NAMES, *facts.CAPITALS.values()))] * (sample // 200)
    tokenizer.train_from_iterator(chain(texts, bare), trainer)
    raw = json.loads(tokenizer.to_str())
    for token in raw["added_tokens"]:
        # The call markers are text that a reader of the output must still see.
        token["special"] = token["content"] in SPECIAL_TOKENS
    return Tokenizer.from_str(json.dumps(raw))


class Packer:
    """Lays documents into rows: first fit from a small pool, the rest is padding.

    A row starts at a document's start, as a prompt does; documents are not cut and are
    not masked from each other, so the model also learns to ignore what went before.
    """

    def __init__(self, tokenizer: Tokenizer, source: Iterator[Doc], pool: int = 96) -> None:
        self.tokenizer, self.source, self.pool = tokenizer, source, pool
        self.end = tokenizer.token_to_id(END)
        self.waiting: list[tuple[list[int], list[bool]]] = []

    def _refill(self, length: int) -> None:
        while len(self.waiting) < self.pool:
            docs = list(islice(self.source, 2 * self.pool))
            texts = [text for doc in docs for text, _ in doc]
            coded = iter(self.tokenizer.encode_batch(texts, add_special_tokens=False))
            for doc in docs:
                ids: list[int] = []
                learned: list[bool] = []
                for _, learn in doc:
                    piece = next(coded).ids
                    ids += piece
                    learned += [learn] * len(piece)
                if ids[-1] != self.end:
                    ids.append(self.end)
                    learned.append(False)
                if len(ids) <= length:
                    self.waiting.append((ids, learned))

    def row(self, length: int) -> tuple[list[int], list[bool]]:
        self._refill(length)
        ids, learned = self.waiting.pop(0)
        index = 0
        while index < len(self.waiting):
            if len(ids) + len(self.waiting[index][0]) <= length:
                more = self.waiting.pop(index)
                ids, learned = ids + more[0], learned + more[1]
            else:
                index += 1
        rest = length - len(ids)
        return ids + [self.end] * rest, learned + [False] * rest

    def batch(self, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and targets [rows, length]; targets that are not learned are -100."""
        made = [self.row(length) for _ in range(rows)]
        ids = np.array([row[0] for row in made], dtype=np.int64)
        learned = np.array([row[1] for row in made])
        targets = np.full_like(ids, -100)
        targets[:, :-1] = np.where(learned[:, 1:], ids[:, 1:], -100)
        return ids, targets
