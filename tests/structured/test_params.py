"""What a request may say about the form of its output."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.errors import InvalidRequest
from quire.params import Grammar, SamplingParams, StructuredOutputsParams
from quire.structured.params import MAX_CHOICES, MAX_GRAMMAR_CHARS, MAX_SCHEMA_DEPTH


def refusal(**given: Any) -> str:
    with pytest.raises(InvalidRequest) as found:
        SamplingParams(structured_outputs=given)
    assert (found.value.param or "").startswith("structured_outputs")
    return found.value.message


def test_one_kind_and_only_one() -> None:
    assert "exactly one of" in refusal()
    assert "got regex, choice" in refusal(regex="a", choice=["a"])
    assert "got none" in refusal(json_object=False)
    assert StructuredOutputsParams(regex="a", json_object=False).kind == "regex"


def test_a_dictionary_is_as_good_as_an_object() -> None:
    given = SamplingParams(structured_outputs={"choice": ("a", "b")})  # type: ignore[arg-type]
    assert given.structured_outputs == StructuredOutputsParams(choice=["a", "b"])
    assert "'colour'" in refusal(colour=1)


def test_a_schema_may_be_text() -> None:
    assert StructuredOutputsParams(json='{"type": "object"}').json == {"type": "object"}
    assert "text that is not JSON" in refusal(json="{")
    assert "text that is not JSON" in refusal(json='{"a": NaN}')
    assert "a JSON object" in refusal(json=[1])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"regex": ""}, "non-empty string"),
        ({"regex": 5}, "got 5"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, str(MAX_GRAMMAR_CHARS)),
        ({"grammar": "\ud800"}, "lone surrogate at position 0"),
        ({"choice": []}, "at least one string"),
        ({"choice": ["a", 1]}, "non-empty strings"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, str(MAX_CHOICES)),
        ({"json_object": "yes"}, "true or false"),
        ({"json": {}, "whitespace_pattern": ""}, "non-empty string"),
        ({"json": {}, "disable_any_whitespace": 1}, "true or false"),
        ({"json": {"a": object()}}, "a JSON object"),
    ],
)
def test_bad_values_are_named(given: dict[str, Any], said: str) -> None:
    assert said in refusal(**given)


def test_nesting_has_a_limit() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_SCHEMA_DEPTH):
        deep = {"items": deep}
    StructuredOutputsParams(json=deep)
    assert str(MAX_SCHEMA_DEPTH) in refusal(json={"items": deep})
    text = '{"items":' * 50_000 + "{}" + "}" * 50_000
    assert "json" in refusal(json=text[:MAX_GRAMMAR_CHARS])


def test_they_travel() -> None:
    sent = SamplingParams(
        structured_outputs={"json": {"type": "object"}, "whitespace_pattern": " ?"},  # type: ignore[arg-type]
        grammar=Grammar("json", "{}"),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=SamplingParams) == sent
