"""Text that no model should write: parsers take it without failing, the same at all cuts, in time
proportional to its length."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parser_kit import TOOLS, all_cases, check_form, cut, read, told
from quire.serving.parsing import PARSERS, REASONING_PARSERS, OutputParser, ParserSetup, Parsing

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
_MARK = re.compile(r"</?[^<>\s]{1,40}>|\[/?[A-Z_]+\]|<function=|<parameter=|functools|Here is my ")
MARKS = sorted({mark for case in all_cases() for mark in _MARK.findall(case.text)})
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


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_names_of_any_length(kind: type[OutputParser]) -> None:
    """Names, keys and headers have a longest length: pieces must not move it."""
    marks = [*marks_of(kind)[:6], "{", '{"', "[now("]
    for first in marks:
        for second in [*marks, '": 1, "name": "now"}']:
            for length in (127, 128, 129, 255, 256, 257, 511, 512, 600):
                text = first + "n" * length + second + "x" + first
                whole = told(read([text], [kind], SETUP))
                assert told(read(list(text), [kind], SETUP)) == whole, text


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
    marks = marks_of(kind)
    plain = ["{", "[", '{"a":', '"', "\\", '{"name": "', " ", "\n", "<", "a", "[f(", "f(a=", "'"]
    halves = [mark[:-1] for mark in marks[:2]]
    return [text for text in (*plain, *marks[:5], *halves, max(real, key=len)) if text]


def marks_of(kind: type[OutputParser]) -> list[str]:
    """What its syntax is made of, as far as its transcripts show."""
    real = [case.text for case in all_cases() if kind in case.kinds]
    return list(dict.fromkeys(mark for text in real for mark in _MARK.findall(text))) or [""]


def heads(kind: type[OutputParser]) -> list[str]:
    """Nothing, and texts that end within a call, with and without its name."""
    real = [case.text for case in all_cases() if kind in case.kinds]
    whole, mark = max(real, key=len), marks_of(kind)[0]
    named = mark + '{"name": "now", "arguments": {"x": "'
    return ["", whole[: len(whole) // 2], named, mark + '{"arguments": {"x": "']


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_time_is_proportional_to_the_text(kind: type[OutputParser]) -> None:
    def lines(text: str, pieces: bool) -> int:
        return lines_run(lambda: read(list(text) if pieces else [text], [kind], SETUP))

    for unit in nasty(kind):
        for head in heads(kind):
            few, many = (head + unit * (n // len(unit) + 1) for n in (300, 1200))
            for pieces in (False, True):
                # Four times the text; quadratic work would be sixteen times as much. Short texts
                # may end before a limit takes effect, so it is not four exactly.
                ratio = lines(many, pieces) / lines(few, pieces)
                assert ratio < 8, (unit, head, ratio)


MEGABYTE = 2**20


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_what_is_held_back_is_short(kind: type[OutputParser]) -> None:
    """Strings that grow with the text would be copied with every piece of it. Parsers hold long
    text in lists, which are joined once."""
    for unit in nasty(kind):
        for head in heads(kind):
            text = head + unit * (12_000 // len(unit))
            chosen = Parsing([kind], SETUP).begin(0, "r")
            assert chosen is not None
            parts: list[Any] = [chosen._parsers[0]]
            for start in range(0, len(text), 7):
                chosen.feed(text[start : start + 7])
                longest = max(len(one) for one in strings_of(parts[0]))
                assert longest <= 1100, (unit, head)


def strings_of(thing: object, depth: int = 3) -> list[str]:
    """All strings that an object or its parts hold."""
    found = [""]
    for value in getattr(thing, "__dict__", {}).values():
        if isinstance(value, str):
            found.append(value)
        elif depth and type(value).__module__.startswith("quire.serving.parsers"):
            found += strings_of(value, depth - 1)
    return found


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_a_megabyte_at_once(kind: type[OutputParser]) -> None:
    """Searching again from the beginning, or copying the rest for each mark, would take hours."""
    real: Sequence[str] = [case.text for case in all_cases() if kind in case.kinds]
    for unit in ('{"name": ', max(real, key=len)):
        text = heads(kind)[1] + unit * (MEGABYTE // len(unit))
        check_form(read([text], [kind], SETUP))
