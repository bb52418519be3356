"""Small tokenizers of the three decoder families, built in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire.tokenizer import Tokenizer

LINES = [
    "The capital of France is Paris. The capital of Italy is Rome.",
    "Hello, world! 你好,世界。 Grüße aus München, naïve café.",
    "def add(a, b):\n    return a + b\n",
    "🙂🙃 emojis 👩‍👩‍👧 and ไทย and עברית",
]
CONFIG = {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}, "pad_token": None}


def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|bos|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(LINES * 3, trainer)
    backend.add_tokens(["two words", "<tool>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return backend


def sentencepiece_backend() -> Backend:
    """Llama-2's kind: ▁ for spaces, byte tokens for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁hello", "▁world", "▁▁", "你"]
    backend = Backend(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def word_piece_backend() -> Backend:
    pieces = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "hello",
        "world",
        "##ing",
        "play",
        ",",
        "!",
        "##s",
        "\ufffd",
    ]
    backend = Backend(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return backend


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend(), CONFIG)


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_backend(), {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="session")
def word_piece() -> Tokenizer:
    return Tokenizer(word_piece_backend(), {"eos_token": "[SEP]"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with tokenizer files."""
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return tmp_path
