"""Incremental detokenisation: deltas add up, characters stay whole, stop strings cut rightly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from quire.outputs import FinishReason
from quire.params import SamplingParams
from quire.tokenizer import IncrementalDetokenizer, Tokenizer

quick = settings(deadline=None, max_examples=150)
byte_ids = st.lists(st.integers(0, 405), max_size=50)
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=8)
texts = st.text(alphabet="ab c你🙂é", max_size=30)
stop_sets = st.lists(st.text(alphabet="ab c你", min_size=1, max_size=4), min_size=1, max_size=4)


def chunks(ids: Sequence[int], pattern: Sequence[int]) -> list[list[int]]:
    """The ids in groups whose sizes repeat `pattern`."""
    groups, start = [], 0
    while start < len(ids):
        size = pattern[len(groups) % len(pattern)]
        groups.append(list(ids[start : start + size]))
        start += size
    return groups


def run(
    tokenizer: Tokenizer | None,
    ids: Sequence[int],
    pattern: Sequence[int] = (1,),
    prompt: Sequence[int] = (5,),
    reason: FinishReason = FinishReason.LENGTH,
    **fields: object,
) -> tuple[IncrementalDetokenizer, list[str]]:
    """Feed ids in groups; the deltas a streaming caller gets, the last one final."""
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**fields), prompt)  # type: ignore[arg-type]
    deltas: list[str] = []
    groups = chunks(ids, pattern) or [[]]
    for i, group in enumerate(groups):
        last = i == len(groups) - 1
        stop = detokenizer.update(group, reason if last else None)
        ended = last or stop is not None
        deltas.append(detokenizer.take(finished=ended, delta=True))
        if ended:
            break
    return detokenizer, deltas


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """Oracle: of all stop strings the one whose end comes first, of equals the longest."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    return min(found) if found else None


@given(ids=byte_ids, pattern=sizes, skip=st.booleans())
@quick
def test_deltas_add_up_to_the_whole_text(
    byte_level: Tokenizer, ids: list[int], pattern: list[int], skip: bool
) -> None:
    detokenizer, deltas = run(byte_level, ids, pattern, skip_special_tokens=skip)
    assert "".join(deltas) == byte_level.decode(ids, skip) == detokenizer.text
    assert detokenizer.token_ids == ids


@given(ids=st.lists(st.integers(0, 300), max_size=50), pattern=sizes)
@quick
def test_deltas_add_up_for_sentencepiece(
    sentencepiece: Tokenizer, ids: list[int], pattern: list[int]
) -> None:
    _, deltas = run(sentencepiece, ids, pattern, prompt=sentencepiece.encode("<s>"))
    assert "".join(deltas) == sentencepiece.decode(ids)


@given(ids=st.lists(st.integers(0, 12), max_size=30), pattern=sizes)
@quick
def test_deltas_add_up_for_word_piece(
    word_piece: Tokenizer, ids: list[int], pattern: list[int]
) -> None:
    _, deltas = run(word_piece, ids, pattern, prompt=[1])
    assert "".join(deltas) == word_piece.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "word_piece", None])
@given(
    ids=byte_ids,
    pattern=sizes,
    flowing=st.lists(st.booleans(), min_size=1, max_size=5),
    prompt=st.sampled_from([[], [1], [5]]),
    reason=st.sampled_from(list(FinishReason)),
)
@quick
def test_flow_is_update_and_take(
    request: pytest.FixtureRequest,
    kind: str | None,
    ids: list[int],
    pattern: list[int],
    flowing: list[bool],
    prompt: list[int],
    reason: FinishReason,
) -> None:
    tokenizer = None if kind is None else request.getfixturevalue(kind)
    if kind == "word_piece":
        ids = [i % 13 for i in ids]
    plain, short = (IncrementalDetokenizer(tokenizer, SamplingParams(), prompt) for _ in range(2))
    for i, group in enumerate(chunks(ids, pattern)):
        plain.update(group)
        expected = plain.take(finished=False, delta=True)
        if flowing[i % len(flowing)]:
            assert short.can_flow
            assert short.flow(group) == expected
        else:
            short.update(group)
            assert short.take(finished=False, delta=True) == expected
        if i % 3 == 2:
            short, other = short.fork(), short
            other.flow(group)  # goes its own way
    assert (short.token_ids, short.text) == (plain.token_ids, plain.text)
    for one in (plain, short):
        one.update(ids[:1], reason)
    assert short.take(finished=True, delta=True) == plain.take(finished=True, delta=True)
    assert (short.token_ids, short.text) == (plain.token_ids, plain.text)


def test_text_with_stop_strings_does_not_flow(byte_level: Tokenizer) -> None:
    assert not IncrementalDetokenizer(byte_level, SamplingParams(stop="b"), []).can_flow


@given(text=texts, pattern=sizes)
@example(text="👩‍👩‍👧", pattern=[1])
@quick
def test_no_replacement_character_for_whole_text(
    byte_level: Tokenizer, text: str, pattern: list[int]
) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    _, deltas = run(byte_level, ids, pattern)
    assert not any("\ufffd" in delta for delta in deltas)


def test_an_incomplete_character_waits_until_the_end(byte_level: Tokenizer) -> None:
    by_bytes = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    half = [by_bytes[b"\xf0"], by_bytes[b"\x9f"]]
    _, deltas = run(byte_level, [by_bytes[b"a"], *half])
    assert deltas == ["a", "", "\ufffd"]
    _, deltas = run(byte_level, [*half, by_bytes[b"a"]])
    assert deltas == ["", "", "\ufffda"]


def test_abort_flushes_an_incomplete_character(byte_level: Tokenizer) -> None:
    by_bytes = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    detokenizer = IncrementalDetokenizer(byte_level, SamplingParams(), [5])
    detokenizer.update([by_bytes[b"\xf0"]])
    assert detokenizer.take(finished=False, delta=True) == ""
    assert detokenizer.take(finished=True, delta=True) == "\ufffd"
    assert detokenizer.take(finished=True, delta=True) == ""


def test_the_prompt_does_not_leak(
    byte_level: Tokenizer, sentencepiece: Tokenizer, word_piece: Tokenizer
) -> None:
    """Half a character at the end of the prompt is the prompt's affair."""
    half, rest = byte_level.encode("你", add_special_tokens=False), byte_level.encode("a", False)
    assert run(byte_level, rest, prompt=half[:1])[1] == ["a"]
    prompt, word = sentencepiece.encode("hello"), sentencepiece.encode("w", False)
    assert "".join(run(sentencepiece, word, prompt=prompt)[1]) == " w"
    assert "".join(run(sentencepiece, word, prompt=[1])[1]) == "w"
    playing = word_piece.encode("playing")
    assert run(word_piece, playing[1:], prompt=playing[:1])[1] == ["ing"]
    assert run(word_piece, word_piece.encode("world"), prompt=playing)[1] == [" world"]


def test_word_piece_special_tokens_can_be_joined(word_piece: Tokenizer) -> None:
    ids = [3, 2, 2, 3]
    shown = {"skip_special_tokens": False}
    _, spaced = run(word_piece, ids, prompt=[4], **shown)
    _, joined = run(word_piece, ids, prompt=[4], **shown, spaces_between_special_tokens=False)
    assert "".join(spaced) == " hello [SEP] [SEP] hello"
    assert "".join(joined) == " hello [SEP][SEP] hello"


def test_a_window_decoder_does_not_hold_forever(word_piece: Tokenizer) -> None:
    """Tokens without text (padding of the vocabulary) never block later ones."""
    _, deltas = run(word_piece, [3, *[999] * 20, 4], prompt=[3])
    assert "".join(deltas) == " hello world"


def test_a_window_decoder_does_not_wait_for_a_broken_character_forever(
    word_piece: Tokenizer,
) -> None:
    (broken,) = word_piece.encode("\ufffd")
    detokenizer = IncrementalDetokenizer(word_piece, SamplingParams(), [3])
    detokenizer.update([broken] * 20)
    assert len(detokenizer.text) >= len(" \ufffd") * 12


@given(text=texts, stops=stop_sets, pattern=sizes, include=st.booleans())
@example(text="abc", stops=["abc", "b"], pattern=[3], include=False)
@example(text="aab", stops=["ab", "b"], pattern=[1], include=True)
@quick
def test_stop_strings_cut_at_the_first_stop(
    byte_level: Tokenizer, text: str, stops: list[str], pattern: list[int], include: bool
) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    detokenizer, deltas = run(
        byte_level, ids, pattern, stop=stops, include_stop_str_in_output=include
    )
    found = first_stop(text, stops)
    expected = text
    if found is not None:
        expected = text[: found[0] if include else found[1]]
    assert detokenizer.stop_string == (found[2] if found else None)
    assert "".join(deltas) == detokenizer.text == expected


@given(ids=byte_ids, stops=stop_sets, first=sizes, second=sizes, min_tokens=st.integers(0, 6))
@quick
def test_grouping_never_shows(
    byte_level: Tokenizer,
    ids: list[int],
    stops: list[str],
    first: list[int],
    second: list[int],
    min_tokens: int,
) -> None:
    fields = {"stop": stops, "min_tokens": min_tokens}
    a, deltas_a = run(byte_level, ids, first, **fields)
    b, deltas_b = run(byte_level, ids, second, **fields)
    assert (a.text, a.token_ids, a.stop_string) == (b.text, b.token_ids, b.stop_string)
    assert "".join(deltas_a) == "".join(deltas_b) == a.text


@pytest.mark.parametrize(
    ("stops", "stop", "text"),
    [
        (["two w", "o"], "o", "tw"),
        (["o", "two w"], "o", "tw"),
        (["o", "wo", "xo"], "wo", "t"),
        (["rds", "words", "s"], "words", "two "),
    ],
)
def test_stops_within_one_token(
    byte_level: Tokenizer, stops: list[str], stop: str, text: str
) -> None:
    """Complete first wins, of equals the longest, whatever the order of the list."""
    (token,) = byte_level.encode("two words", add_special_tokens=False)
    detokenizer, _ = run(byte_level, [token], stop=stops)
    assert (detokenizer.stop_string, detokenizer.text) == (stop, text)


def test_a_stop_string_can_be_the_broken_character_at_the_end(byte_level: Tokenizer) -> None:
    by_bytes = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    ids = [by_bytes[b"a"], by_bytes[b"\xf0"]]
    assert run(byte_level, ids, stop="\ufffd")[0].stop_string == "\ufffd"
    assert run(byte_level, [*ids, ids[0]], stop="\ufffd")[0].text == "a"


def test_tokens_after_the_stop_are_dropped(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a b c d e", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(byte_level, SamplingParams(stop="b"), [5])
    assert detokenizer.update(ids) == "b"
    assert detokenizer.token_ids == ids[:2]
    assert detokenizer.update(ids) == "b"
    assert (detokenizer.text, detokenizer.token_ids) == ("a ", ids[:2])


@pytest.mark.parametrize("include", [False, True])
def test_text_that_may_be_cut_is_held_back(byte_level: Tokenizer, include: bool) -> None:
    params = SamplingParams(stop=["stop", "x"], include_stop_str_in_output=include)
    detokenizer = IncrementalDetokenizer(byte_level, params, [5])
    detokenizer.update(byte_level.encode("abcdst", add_special_tokens=False))
    held = 0 if include else 3
    assert detokenizer.take(finished=False, delta=False) == "abcdst"[: 6 - held]
    assert detokenizer.take(finished=False, delta=True) == "abcdst"[: 6 - held]
    assert detokenizer.take(finished=True, delta=True) == "abcdst"[6 - held :]


def test_stop_strings_are_not_searched_before_min_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a b a b", add_special_tokens=False)
    assert len(ids) == 4
    assert run(byte_level, ids, [4], stop="b", min_tokens=0)[0].text == "a "
    assert run(byte_level, ids, [4], stop="b", min_tokens=2)[0].text == "a b a "
    assert run(byte_level, ids, [4], stop="b", min_tokens=4)[0].text == "a b a b"
    # a stop string that began before the limit and ends after it counts
    assert run(byte_level, ids, [4], stop="b a", min_tokens=2)[0].text == "a "


@pytest.mark.parametrize(
    ("reason", "include", "text"),
    [
        (FinishReason.STOP, False, "ab"),
        (FinishReason.STOP, True, "abc"),
        (FinishReason.LENGTH, False, "abc"),
    ],
)
def test_a_stop_token_adds_no_text(
    byte_level: Tokenizer, reason: FinishReason, include: bool, text: str
) -> None:
    ids = [i for c in "abc" for i in byte_level.encode(c, add_special_tokens=False)]
    got, deltas = run(byte_level, ids, reason=reason, include_stop_str_in_output=include)
    assert got.text == "".join(deltas) == text
    assert got.token_ids == ids


@given(ids=byte_ids, pattern=sizes)
@quick
def test_cumulative_text_only_grows(
    byte_level: Tokenizer, ids: list[int], pattern: list[int]
) -> None:
    assume(ids)
    detokenizer = IncrementalDetokenizer(byte_level, SamplingParams(stop=["zzz", "你"]), [5])
    before = ""
    for group in chunks(ids, pattern):
        stopped = detokenizer.update(group) is not None
        text = detokenizer.take(finished=stopped, delta=False)
        assert text.startswith(before)
        before = text


def test_without_text(byte_level: Tokenizer) -> None:
    assert run(byte_level, [70, 71], detokenize=False)[0].text == ""
    detokenizer, deltas = run(None, [70, 71])
    assert (detokenizer.token_ids, deltas) == ([70, 71], ["", ""])
