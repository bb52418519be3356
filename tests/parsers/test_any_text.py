"""Text that no model should write: parsers take it without failing, the same at all cuts, in time
proportional to its length."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parser_kit import TOOLS, all_cases, check_form, cut, kinds_of, read, told
from quire.serving.parsing import PARSERS, REASONING_PARSERS, OutputParser, ParserSetup

SETUP = ParserSetup("", TOOLS)
ALL: dict[str, type[OutputParser]] = {
    f"{kind}-{name}": table.get(name)
    for kind, table in (("tools", PARSERS), ("reasoning", REASONING_PARSERS))
    for name in table
}
CLASSES = sorted(set(ALL.values()), key=lambda kind: kind.__qualname__)
_WORDS = (
    *'{}[]()"\'\\:,=<>/;|.-+ \n\t0a\u00e9\u6771\U0001f98a\u0000',
    "get_weather", "now", '"name"', '"arguments"', '"parameters"', '"city"', "city", "null", "True",
    "1e5", "-0", "\\u00e9", "\\ud83e", "\\n", "```json\n", "```",
)  # fmt: skip
MARKS = sorted(
    {
        piece
        for case in all_cases()
        for kind in case.kinds
        for piece in (*kind.special_tokens, *getattr(kind, "SYNTAX", ()))
    }
)
words = st.sampled_from((*_WORDS, *MARKS))
texts = st.lists(words, max_size=40).map("".join)
places = st.lists(st.integers(0, 10**6), max_size=10)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
@given(text=texts, at=places)
@settings(max_examples=150)
def test_any_text(kind: type[OutputParser], text: str, at: list[int]) -> None:
    whole = read([text], [kind], SETUP)
    check_form(whole)
    assert told(read(cut(text, at), [kind], SETUP)) == told(whole)
    assert told(read(list(text), [kind], SETUP)) == told(whole)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
@given(text=st.text(st.sampled_from("abc \n.,!?'é東"), max_size=60), at=places)
@settings(max_examples=40)
def test_plain_text_stays_as_it_is(kind: type[OutputParser], text: str, at: list[int]) -> None:
    said = told(read(cut(text, at), [kind], SETUP))
    assert "".join(part[1] for part in said if part[0] == "text") == text or kind_reasons(kind)


def kind_reasons(kind: type[OutputParser]) -> bool:
    """Whether all text is reasoning to the parser, until a mark ends it."""
    return bool(getattr(kind, "always", False))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_pieces_of_real_texts_in_any_order(kind: type[OutputParser]) -> None:
    """Marks in the wrong order, calls within calls, halves of calls."""
    rng = random.Random(kind.__qualname__)
    real = [case.text for case in all_cases() if kind in case.kinds]
    for _ in range(60):
        pieces = []
        for _ in range(rng.randint(1, 5)):
            text = rng.choice(real)
            start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
            pieces.append(text[start:end])
        text = "".join(pieces)
        whole = read([text], [kind], SETUP)
        check_form(whole)
        assert told(read(list(text), [kind], SETUP)) == told(whole), text


# ---- time ----------------------------------------------------------------------------------------


def lines_run(work: Callable[[], Any]) -> int:
    """How many lines of Python an action runs; what a machine is busy with does not change it."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if event == "line":
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def nasty(kind: type[OutputParser]) -> list[str]:
    """Beginnings of texts that a parser could read again and again; each is repeated."""
    real = [case.text for case in all_cases() if kind in case.kinds]
    marks = (*kind.special_tokens, *getattr(kind, "SYNTAX", ()))
    plain = ["{", "[", '{"a":', '"', "\\", '{"name": "', " ", "\n", "<", "a", "[f(", "f(a=", "'"]
    return [*plain, *marks, *(mark[:-1] for mark in marks), *real]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_time_is_proportional_to_the_text(kind: type[OutputParser]) -> None:
    heads = ["", *(case.text[: len(case.text) // 2] for case in all_cases() if kind in case.kinds)]
    for unit in nasty(kind):
        for head in heads[:4]:
            few, many = (head + unit * (n // len(unit) + 1) for n in (400, 1600))
            for split in (lambda text: [text], list):
                ratio = lines_run(lambda: read(split(many), [kind], SETUP)) / lines_run(  # noqa: B023
                    lambda: read(split(few), [kind], SETUP)  # noqa: B023
                )
                assert ratio < 6, (unit, head, ratio)


class Copied(str):
    """A text that counts how many characters are copied out of it."""


MEGABYTE = 2**20


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_a_megabyte(kind: type[OutputParser]) -> None:
    """Whole and in pieces of a few characters; quadratic copying would take minutes here."""
    real: Sequence[str] = [case.text for case in all_cases() if kind in case.kinds]
    for unit in (" ", "{", '{"name": "x", ', max(real, key=len)):
        text = real[0][: len(real[0]) // 2] + unit * (MEGABYTE // len(unit))
        pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
        assert read([text], [kind], SETUP) is not None
        assert read(pieces, [kind], SETUP) is not None


def test_names_are_those_of_the_tables() -> None:
    assert kinds_of("hermes") == [PARSERS.get("hermes")]
