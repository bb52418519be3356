"""Sentencepiece, tiktoken, GGUF and vocab.json vocabularies give the originals' ids and text."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece as spm
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from quire.errors import ModelLoadError
from quire.params import SamplingParams
from quire.tokenizer import Tokenizer, byte_bpe
from quire.tokenizer.byte_spelling import BYTE_TO_CHAR
from quire.tokenizer.detokenizer import text_stream
from quire.tokenizer.protobuf import NotAMessage, fields
from quire.tokenizer.sentencepiece import UNIGRAM, read_model

CORPUS = [
    "The capital of France is Paris. The capital of Italy is Rome.",
    "the cat sat on the mat and the other cat sat on the other mat",
    "def add(a, b):\n    return a + b\n\n\nclass Thing:\n    pass",
    "Hello, world! It's 1234567 degrees; don't they'll we've I'm you'd.",
    "Grüße aus München, naïve café, ½ ﬁne Ⅷ",
    "你好,世界。你好,朋友。",
    "aaaa aaaaaa aaa aa a  bb   bbb    bbbb",
    "<x> and <y/> and <z>",
]
texts = st.text(
    st.sampled_from("aabcdeht  \n\t.,'0123éü你好ﬁ½🙂\u0301\u3000▁<>x/")
    | st.characters(codec="utf-8"),
    max_size=40,
) | st.lists(st.sampled_from([w for line in CORPUS for w in line.split(" ")]), max_size=12).map(
    " ".join
)
SPM_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
              "remove_extra_whitespaces": False},
    "no prefix": {"model_type": "bpe", "byte_fallback": True,
                  "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
                  "add_dummy_prefix": False, "user_defined_symbols": ["<x>", "<y/>"]},
    "bpe, nfkc": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram"},
    "unigram, bytes": {"model_type": "unigram", "byte_fallback": True},
    "unigram, plain": {"model_type": "unigram", "normalization_rule_name": "identity",
                       "remove_extra_whitespaces": False, "byte_fallback": True},
}  # fmt: skip


def trained(**options: Any) -> bytes:
    out = io.BytesIO()
    size = 420 if options.get("byte_fallback") else 150
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 5), model_writer=out, vocab_size=size,
        hard_vocab_limit=False, minloglevel=2, num_threads=1, **options,
    )  # fmt: skip
    return out.getvalue()


@pytest.fixture(scope="session")
def spm_pair(tmp_path_factory: Any) -> Callable[[str], tuple[Any, Tokenizer]]:
    """The original and ours, by kind; trained once."""
    made: dict[str, tuple[Any, Tokenizer]] = {}

    def get(kind: str) -> tuple[Any, Tokenizer]:
        if kind not in made:
            data = trained(**SPM_KINDS[kind])
            folder = tmp_path_factory.mktemp("spm")
            (folder / "tokenizer.model").write_bytes(data)
            (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
            made[kind] = spm.SentencePieceProcessor(model_proto=data), Tokenizer.from_folder(folder)
        return made[kind]

    return get


@pytest.mark.parametrize("kind", SPM_KINDS)
def test_sentencepiece_ids_are_the_originals(kind: str, spm_pair: Any) -> None:
    original, ours = spm_pair(kind)
    assert ours.vocab_size == original.get_piece_size()
    controls = ("<s>", "</s>", "<unk>")

    @given(texts)
    @example("")
    @example(" leading and  double   spaces ")
    @example("aaaaaaaaaaaaaaaaaaaaaaaaaaa")
    @example("     ")
    @example("\n\n\ta\n")
    @settings(max_examples=250, deadline=None)
    def check(text: str) -> None:
        if any(token in text for token in controls) or "\0" in text:
            return  # sentencepiece keeps these from plain text; in chat templates they are tokens
        ids, theirs = ours.encode(text), original.encode(text)
        assert ids == theirs or equally_likely(original, ids, theirs), text

    check()
    for line in CORPUS:
        assert ours.encode(line) == original.encode(line)


def equally_likely(original: Any, ids: list[int], theirs: list[int]) -> bool:
    """Whether a unigram model cannot tell two ways to cut a text apart in its float32 scores."""
    if original.decode(ids) != original.decode(theirs):
        return False
    model = read_model(original.serialized_model_proto())
    one, other = (sum(model.pieces[i].score for i in way) for way in (ids, theirs))
    return model.model_type == UNIGRAM and abs(one - other) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "no prefix", "unigram, plain", "unigram, bytes"])
def test_sentencepiece_text_is_the_originals(kind: str, spm_pair: Any) -> None:
    original, ours = spm_pair(kind)
    unknown = original.unk_id()

    @given(st.lists(st.integers(0, original.get_piece_size() - 1), max_size=20))
    @settings(max_examples=200, deadline=None)
    def check(ids: list[int]) -> None:
        # The original writes ⁇ for the unknown token, keeps a space that a byte token spells, and
        # lets a control token, which neither writes, part the bytes of a character.
        left_out = (unknown, original.piece_to_id("<0x20>"))
        ids = [i for i in ids if i not in left_out and not original.is_control(i)]
        # Broken UTF-8: the original writes U+FFFD for each byte, we for each broken character.
        assert one_mark(ours.decode(ids)) == one_mark(original.decode(ids))

    check()


def one_mark(text: str) -> str:
    return re.sub("\ufffd+", "\ufffd", text)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = text_stream(tokenizer, SamplingParams(), [])
    return [*map(stream.feed, ids), stream.flush()]


@pytest.mark.parametrize("kind", ["llama", "unigram, plain", "no prefix"])
def test_streaming_never_splits_a_character(kind: str, spm_pair: Any) -> None:
    _, ours = spm_pair(kind)
    text = "naïve 🙂 你好 𝔘𝔫𝔦 👩‍👩‍👧 done"
    ids = ours.encode(text, add_special_tokens=False)
    pieces = streamed(ours, ids)
    assert "".join(pieces) == ours.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(1 for piece in pieces if piece) < len(ids), "bytes were held back"


def test_special_tokens_are_single_ids_in_text(spm_pair: Any) -> None:
    original, ours = spm_pair("llama")
    ids = ours.encode("<s>the cat</s>", add_special_tokens=False)
    assert ids[0] == original.bos_id() and ids[-1] == original.eos_id()
    assert ids[1:-1] == original.encode("the cat")
    assert ours.all_special_ids == {original.unk_id(), original.bos_id(), original.eos_id()}
    assert ours.bos_token_id == original.bos_id()


def test_begin_and_end_tokens_as_configured(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained(**SPM_KINDS["llama"]))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": {"content": "<s>"},
              "eos_token": "</s>"}  # fmt: skip
    for extra, first, last in (
        ({}, True, False),
        ({"add_bos_token": False, "add_eos_token": True}, False, True),
        ({"add_eos_token": True}, True, True),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **extra}))
        ids = Tokenizer.from_folder(tmp_path).encode("the cat")
        assert (ids[0] == 1, ids[-1] == 2) == (first, last)


def test_llama_agrees_with_transformers(tmp_path: Path, spm_pair: Any) -> None:
    """The reference for special tokens inside text, which sentencepiece itself does not have."""
    from transformers import LlamaTokenizer

    (tmp_path / "tokenizer.model").write_bytes(trained(**SPM_KINDS["llama"]))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>",
              "unk_token": "<unk>", "legacy": False, "add_bos_token": True}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, ours = LlamaTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    for text in (*CORPUS, "<s>[INST] the cat [/INST] sat</s><s> the mat", "the</s>cat"):
        assert ours.encode(text) == theirs.encode(text), text


def test_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    for kind in ("llama", "unigram, bytes"):
        data = trained(**SPM_KINDS[kind])
        size = spm.SentencePieceProcessor(model_proto=data).get_piece_size()
        (tmp_path / "tokenizer.model").write_bytes(data)
        config = {"added_tokens_decoder": {
            str(size + 3): {"content": "<|user|>", "special": True},
            str(size + 5): {"content": "<tool>", "special": False, "lstrip": True},
        }}  # fmt: skip
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        ours = Tokenizer.from_folder(tmp_path)
        ids = ours.encode("a<|user|>b <tool>", add_special_tokens=False)
        assert size + 3 in ids and ids[-1] == size + 5
        assert size + 3 in ours.all_special_ids and size + 5 not in ours.all_special_ids
        plain = ours.encode("the other mat", add_special_tokens=False)
        assert plain == spm.SentencePieceProcessor(model_proto=data).encode("the other mat")


def test_chatglm_tokens_and_prefix(tmp_path: Path) -> None:
    data = trained(**SPM_KINDS["llama"])
    size = spm.SentencePieceProcessor(model_proto=data).get_piece_size()
    (tmp_path / "tokenizer.model").write_bytes(data)
    config = {"tokenizer_class": "ChatGLMTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.from_folder(tmp_path)
    ids = ours.encode("<|user|>the cat")
    assert ids[:2] == [size + 1, size + 3], "[gMASK] sop"
    assert ids[2] == size + 6
    assert ours.decode(ids) == "the cat"


# ------------------------------------------------------------------------------------- tiktoken


def byte_ranks(pattern: str) -> dict[bytes, int]:
    """Ranks as tiktoken has them: bytes first, then merged tokens in the order of training."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    backend.train_from_iterator(CORPUS * 5, trainer)
    to_byte = {char: byte for byte, char in BYTE_TO_CHAR.items()}
    ordered = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(to_byte[c] for c in token) for token, _ in ordered]
    single = [bytes([b]) for b in range(256)]
    return {t: i for i, t in enumerate([*single, *(t for t in tokens if len(t) > 1)])}


def tiktoken_file(ranks: dict[bytes, int]) -> str:
    return "".join(f"{base64.b64encode(t).decode()} {i}\n" for t, i in ranks.items())


@pytest.mark.parametrize(
    ("name", "kind", "pattern"),
    [
        ("qwen.tiktoken", "QWenTokenizer", "qwen"),
        ("tokenizer.model", "ChatGLM4Tokenizer", "cl100k"),
        ("tokenizer.model", None, "cl100k"),
    ],
)
def test_tiktoken_ids_are_the_originals(
    tmp_path: Path, name: str, kind: str | None, pattern: str
) -> None:
    ranks = byte_ranks(pattern)
    marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    special = {mark: len(ranks) + i for i, mark in enumerate(marks)}
    original = tiktoken.Encoding(
        "test", pat_str=byte_bpe.PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=special
    )
    (tmp_path / name).write_text(tiktoken_file(ranks))
    config: dict[str, Any] = {"tokenizer_class": kind, "eos_token": "<|endoftext|>"}
    if kind != "QWenTokenizer":  # that class's code has them, in this order
        entries = {str(i): {"content": t, "special": True} for t, i in special.items()}
        config["added_tokens_decoder"] = entries
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.eos_token_id == len(ranks)

    @given(texts)
    @example("1234567 12 it's aaaaaaaa\r\n\n  x")
    @example("a<|im_end|> b")
    @settings(max_examples=300, deadline=None)
    def check(text: str) -> None:
        ids = original.encode(text, disallowed_special=(), allowed_special="all")
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids)

    check()
    ids = ours.encode("<|im_start|>x<|endoftext|>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (len(ranks) + 1, len(ranks))
    text = "naïve 🙂 你好"
    pieces = streamed(ours, ours.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


def test_vocab_and_merges(tmp_path: Path) -> None:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    ours = Tokenizer.from_folder(tmp_path)

    @given(texts)
    @settings(max_examples=100, deadline=None)
    def check(text: str) -> None:
        assert ours.encode(text) == backend.encode(text).ids

    check()


# ----------------------------------------------------------------------------------------- GGUF


def gguf_with(path: Path, **entries: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in entries.items():
        name = "tokenizer." + name.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_sentencepiece_vocabulary_in_gguf(tmp_path: Path, spm_pair: Any) -> None:
    original, _ = spm_pair("llama")
    model = read_model(original.serialized_model_proto())
    path = gguf_with(
        tmp_path / "m.gguf",
        ggml__model="llama",
        ggml__tokens=[piece.text for piece in model.pieces],
        ggml__scores=[piece.score for piece in model.pieces],
        ggml__token_type=[piece.type for piece in model.pieces],
        ggml__bos_token_id=1,
        ggml__eos_token_id=2,
        chat_template="{{ bos_token }}{{ messages[0].content }}",
    )
    for source in (path, tmp_path):
        ours = Tokenizer.from_folder(source)
        assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
        for text in CORPUS:
            assert ours.encode(text) == [1, *original.encode(text)]
            assert ours.decode(original.encode(text)) == original.decode(original.encode(text))
        assert ours.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>hi"


def test_a_byte_level_vocabulary_in_gguf(tmp_path: Path) -> None:
    ranks = byte_ranks("qwen")
    reference = byte_bpe.tiktoken_json(ranks, {"tokenizer_class": "QWenTokenizer"})["model"]
    original = tiktoken.Encoding(
        "t", pat_str=byte_bpe.PATTERNS["qwen"], mergeable_ranks=ranks, special_tokens={}
    )
    tokens = [*reference["vocab"], "<|im_end|>"]
    options: dict[str, Any] = {
        "ggml__model": "gpt2",
        "ggml__pre": "qwen2",
        "ggml__tokens": tokens,
        "ggml__merges": [" ".join(merge) for merge in reference["merges"]],
        "ggml__token_type": [1] * len(ranks) + [3],
        "ggml__eos_token_id": len(ranks),
    }
    ours = Tokenizer.from_folder(gguf_with(tmp_path / "m.gguf", **options))
    assert ours.eos_token_id == len(ranks) and len(ranks) in ours.all_special_ids
    for text in CORPUS:
        assert ours.encode(text) == original.encode(text)
    for change, words in (
        ({"ggml__pre": "viking"}, "cuts words by the rule 'viking'"),
        ({"ggml__model": "bert"}, "has no tokenizer that quire reads ('bert')"),
        ({"ggml__pre": [1]}, "cuts words by the rule '[1]'"),
        ({"ggml__model": [1]}, "has no tokenizer that quire reads ([1])"),
        ({"ggml__token_type": [1]}, "tokens without types"),
        ({"ggml__merges": [1]}, "without merges"),
    ):
        path = gguf_with(tmp_path / "bad.gguf", **{**options, **change})
        with pytest.raises(ModelLoadError) as caught:
            Tokenizer.from_folder(path)
        assert words in caught.value.message
        assert "put tokenizer.json and tokenizer_config.json" in caught.value.message


def test_tokenizer_files_beside_a_gguf_file_win(folder: Path) -> None:
    path = gguf_with(folder / "m.gguf", ggml__model="bert")
    assert Tokenizer.from_folder(path).encode("x") == Tokenizer.from_folder(folder).encode("x")


# ---------------------------------------------------------------------------------- broken files


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "vocab.json"])
@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 50, b"{}", b"QQ== 0\nnonsense\n", b"QQ== 0\n", b"\x0a\xff\xff\xff"]
)
def test_a_broken_vocabulary_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "merges.txt").write_text("a b c d\n")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.from_folder(tmp_path)


@given(st.binary(max_size=100))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_message_or_not(data: bytes) -> None:
    try:
        list(fields(data))
        read_model(data)
    except NotAMessage:
        pass


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_changed_vocabulary_never_crashes(tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp() / "changed-vocabulary"
    if not folder.exists():
        folder.mkdir()
        (folder / "good").write_bytes(trained(model_type="unigram"))
        (folder / "tokenizer_config.json").write_text("{}")
    raw = bytearray((folder / "good").read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, min(len(raw) - 1, 3000)))] = data.draw(st.integers(0, 255))
    (folder / "tokenizer.model").write_bytes(raw)
    try:
        Tokenizer.from_folder(folder)
    except ModelLoadError as error:
        assert "tokenizer.model" in error.message


def test_a_map_of_characters_that_is_a_number(tmp_path: Path) -> None:
    piece, normalizer = b"\x0a\x03\x0a\x01a", b"\x1a\x02\x10\x07"
    (tmp_path / "tokenizer.model").write_bytes(piece + normalizer)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model.*map of characters"):
        Tokenizer.from_folder(tmp_path)


def test_a_file_at_which_the_library_panics_is_refused(tmp_path: Path) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    written = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json.*precompiled_charsmap"):
        Tokenizer.from_folder(tmp_path)
