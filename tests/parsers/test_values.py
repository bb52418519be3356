"""Values of syntaxes without JSON: Python literals, and text that gets the types of a schema."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parser_kit import cut
from quire.serving.parsers.python_text import PythonValue, python_to_json, word_to_json
from quire.serving.parsers.typed_values import typed, types_of

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    ),
    max_leaves=12,
)


def as_json(value: Any) -> Any:
    """What JSON has of a value."""
    return json.loads(json.dumps(value))


@given(values)
def test_literals_are_what_python_says(value: Any) -> None:
    read = python_to_json(repr(value))
    assert read is not None and json.loads(read) == as_json(value)


@given(values, st.lists(st.integers(0, 10**6), max_size=6))
def test_literals_in_pieces(value: Any, places: list[int]) -> None:
    text = repr(value)
    parts: list[str] = []
    reader = PythonValue(parts.append)
    for piece in cut(text, places):
        assert reader.take(piece, 0) == len(piece)
    reader.end()
    assert "".join(parts) == python_to_json(text)


@pytest.mark.parametrize(
    "literal",
    [
        r"'a\n\t\\\'\"\x41\u00e9\U0001f98a\101\0'", "'''a'b''c'''", '"""x"""', "''", '""',
        "'a\\\nb'",
        "r'\\d+'", "-12", "+12", "1_000", ".5", "5.", "1e10", "0x1F", "[]", "()", "{}", "(1,)",
        "[1, [2, (3, {'a': None})],]", "{'a': 1, 'b': [True, False]}", "b'x'",
    ],
)  # fmt: skip
def test_literals(literal: str) -> None:
    read = python_to_json(literal)
    value = ast.literal_eval(literal)
    value = value.decode() if isinstance(value, bytes) else value
    assert read is not None and json.loads(read) == as_json(value)


def test_half_characters_join() -> None:
    assert json.loads(python_to_json(r"'\ud83e\udd8a'") or "") == "\U0001f98a"


@given(st.text(st.sampled_from("[](){}:,='\"\\ abx01.-_rTrueNon\n"), max_size=30))
def test_any_text_is_read_without_failing(text: str) -> None:
    if text and text[0] not in ")]}:=, \n":
        read = python_to_json(text)
        if read is not None:
            json.loads(read)


@pytest.mark.parametrize("digits", [20, 5000, 200_000])
def test_numbers_stay_as_they_are_written(digits: int) -> None:
    number = "7" * digits
    assert word_to_json(number) == number
    assert typed(number, frozenset(("integer",))) == number
    assert typed(number, frozenset(("string",))) == f'"{number}"'


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("1.50", {"number"}, "1.50"), ("1.5", {"integer"}, '"1.5"'), (" 12 ", {"integer"}, "12"),
        ("12", set(), "12"), ("x", set(), '"x"'), ("True", {"boolean"}, "true"),
        ("true", {"string", "boolean"}, "true"), ("None", {"null", "string"}, "null"),
        ("null", {"string", "null"}, "null"), ("{'a': 1}", {"object"}, '{"a": 1}'),
        ("{'a': 1}", {"integer"}, "\"{'a': 1}\""), ("[1", {"array"}, '"[1"'),
        ("NaN", set(), '"NaN"'),
        ('{"a": 1.0}', {"object"}, '{"a": 1.0}'), ("[" * 9999, {"array"}, '"' + "[" * 9999 + '"'),
        ("", {"integer"}, '""'),
    ],
)  # fmt: skip
def test_text_gets_the_type_of_the_schema(text: str, types: set[str], expected: str) -> None:
    assert typed(text, frozenset(types)) == expected


def test_types_of_schemas() -> None:
    deep: Any = {"type": "string"}
    for _ in range(2000):
        deep = {"anyOf": [deep]}
    for schema, expected in (
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "null"}]}]}, {"integer", "null"}),
        ({"properties": {}}, {"object"}),
        ({"type": 5}, set()), ({"enum": 5}, set()), (True, set()), (None, set()), (deep, set()),
    ):  # fmt: skip
        assert types_of(schema) == expected
