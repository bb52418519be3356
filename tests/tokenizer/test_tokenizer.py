"""The tokenizer façade: files, ids, bytes, special tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from quire.errors import InvalidRequest, ModelLoadError
from quire.tokenizer import Tokenizer
from quire.tokenizer.byte_spelling import byte_spelling
from quire.tokenizer.pairs import LONG_TEXT, encode_alone
from work import lines_of

ids_of = {
    "byte_level": st.lists(st.integers(0, 410), max_size=40),
    "sentencepiece": st.lists(st.integers(0, 300), max_size=40),
}


def test_loads_a_model_folder(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_id == 1
    assert tokenizer.all_special_ids == {0, 1}
    assert (
        tokenizer.vocab_size == Backend.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    )
    assert tokenizer.chat_template is None


def test_loading_does_not_grow_with_the_vocabulary(folder: Path) -> None:
    """What there is to do for each token, the library does: a vocabulary has 150,000."""

    def load() -> None:
        Tokenizer.from_folder(folder)

    load()
    few = lines_of(load)
    path = folder / "tokenizer.json"
    file = json.loads(path.read_text())
    vocab = file["model"]["vocab"]
    vocab |= {f"more{i}": len(vocab) + 10 + i for i in range(5000)}
    path.write_text(json.dumps(file))
    assert lines_of(load) == few < 3000


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [None, "{", "[]", b"\xff\xfe{}"])
def test_a_bad_file_is_named(folder: Path, name: str, content: str | bytes | None) -> None:
    path = folder / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.from_folder(folder)


def test_special_tokens_are_added_only_when_asked(byte_level: Tokenizer) -> None:
    assert byte_level.encode("Hello")[0] == byte_level.bos_token_id
    assert byte_level.bos_token_id not in byte_level.encode("Hello", add_special_tokens=False)


def test_truncation_and_padding_of_the_file_are_off(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("Hello, world! Hello!")) == "Hello, world! Hello!"
    assert 4 < len(tokenizer.encode("Hello, world! Hello!")) < 50


def test_a_token_the_configuration_names_is_special(folder: Path) -> None:
    config = {"eos_token": "<tool>"}  # an added token that tokenizer.json does not call special
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_id in tokenizer.all_special_ids
    assert tokenizer.decode(tokenizer.encode("a<tool>b")) == "ab"


def test_an_unknown_named_token_has_no_id(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<never heard of>"}')
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_id is None
    assert tokenizer.all_special_ids == {0, 1}


def test_lone_surrogates_are_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        byte_level.encode("a\ud800b")


@given(text=st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=60))
@settings(deadline=None, max_examples=200)
def test_text_survives_the_round_trip(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    assert byte_level.decode(ids, skip_special_tokens=False) == text


@given(ids=ids_of["byte_level"], skip=st.booleans())
@settings(deadline=None, max_examples=300)
def test_byte_level_decoding_equals_the_library(
    byte_level: Tokenizer, ids: list[int], skip: bool
) -> None:
    expected = byte_level._backend.decode(ids, skip_special_tokens=skip)
    assert byte_level.decode(ids, skip) == expected


@given(ids=ids_of["sentencepiece"], skip=st.booleans())
@settings(deadline=None, max_examples=500)
def test_sentencepiece_decoding_equals_the_library_on_whole_characters(
    sentencepiece: Tokenizer, ids: list[int], skip: bool
) -> None:
    """On broken bytes the library replaces whole runs; we replace what is broken."""
    expected = sentencepiece._backend.decode(ids, skip_special_tokens=skip)
    text = sentencepiece.decode(ids, skip)
    assert text == expected or "\ufffd" in expected


def test_sentencepiece_drops_one_leading_space(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.decode(sentencepiece.encode("hello")) == "hello"
    assert sentencepiece.decode(sentencepiece.encode(" hello")) == " hello"


def test_word_piece_is_left_to_the_library(word_piece: Tokenizer) -> None:
    ids = word_piece.encode("hello playing, world!")
    assert word_piece.decode(ids) == "hello playing , world !"
    assert word_piece.token_bytes(3) is None
    assert word_piece.id_to_text(3) == "hello"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "word_piece"])
@pytest.mark.parametrize("unknown", [-1, 10**4, 2**31, 2**32, 2**63, 10**30])
def test_unknown_ids_are_no_text(request: pytest.FixtureRequest, kind: str, unknown: int) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    assert tokenizer.id_to_text(unknown) == ""
    assert tokenizer.decode([unknown]) == ""


def test_text_of_single_tokens(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert byte_level.id_to_text(1) == "<|end|>"
    (paris,) = [i for i in range(400) if byte_level.token_bytes(i) == b" capital"]
    assert byte_level.id_to_text(paris) == " capital"
    (lead,) = [i for i in range(400) if byte_level.token_bytes(i) == b"\xe4"]
    assert byte_level.id_to_text(lead) == "\ufffd"
    hello = sentencepiece.encode("hello", add_special_tokens=False)
    assert "".join(map(sentencepiece.id_to_text, hello)) == " hello"


def test_id_to_text_is_total(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentencepiece):
        texts = [tokenizer.id_to_text(i) for i in range(tokenizer.vocab_size + 64)]
        assert all(isinstance(text, str) for text in texts)
        assert texts[-64:] == [""] * 64


def test_longest_token_bounds_every_token(byte_level: Tokenizer) -> None:
    longest = max(len(byte_level.id_to_text(i)) for i in range(byte_level.vocab_size))
    assert longest <= byte_level.longest_token < 60


STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}


@pytest.mark.parametrize(
    ("steps", "exact"),
    [
        ([{"type": "ByteLevel"}], True),
        ([REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}], True),
        ([REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP], True),
        ([REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP | {"stop": 1}], False),
        ([REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP | {"content": "x"}], False),
        ([REPLACE, {"type": "ByteFallback"}, STRIP], False),
        ([REPLACE, {"type": "Fuse"}], False),
        (
            [REPLACE | {"pattern": {"Regex": "x"}}, {"type": "ByteFallback"}, {"type": "Fuse"}],
            False,
        ),
        ([{"type": "Metaspace", "replacement": "▁"}], False),
        ([{"type": "ByteFallback"}, {"type": "Metaspace"}], False),
        ([{"type": "WordPiece"}], False),
        ([{"type": "ByteFallback"}], False),
        ([], False),
    ],
)
def test_only_known_decoders_count_as_exact_in_bytes(
    steps: list[dict[str, object]], exact: bool
) -> None:
    assert (byte_spelling({"type": "Sequence", "decoders": steps}) is not None) is exact
    if len(steps) == 1:
        assert (byte_spelling(steps[0]) is not None) is exact


class Spy:
    """A backend that says which of its calls was made."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.calls = backend, []

    def __getattr__(self, name: str) -> object:
        self.calls.append(name)
        return getattr(self.backend, name)


@pytest.mark.parametrize("special", [False, True])
def test_long_texts_take_the_call_that_lets_other_threads_run(
    byte_level: Tokenizer, special: bool
) -> None:
    text = "a cat, 東京 🦊 \n" * (LONG_TEXT // 10)
    for length, call in ((LONG_TEXT, "encode"), (LONG_TEXT + 1, "encode_batch_fast")):
        spy = Spy(byte_level._backend)
        found = encode_alone(spy, text[:length], special)  # type: ignore[arg-type]
        assert spy.calls == [call]
        whole = byte_level._backend.encode(text[:length], add_special_tokens=special)
        assert found.ids == whole.ids == byte_level.encode(text[:length], special)


def test_long_texts_are_cut_like_short_ones(byte_level: Tokenizer) -> None:
    text = "a cat, 東京 🦊 \n" * LONG_TEXT
    whole = byte_level.encode(text, False)
    assert byte_level.encode_within(text, 5000, "right", False) == whole[:5000]
    assert byte_level.encode_within(text, 5000, "left", False) == whole[-5000:]
    with pytest.raises(InvalidRequest, match="surrogates"):
        byte_level.encode("\ud800" + text)
