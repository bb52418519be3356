"""Requests for structured outputs, and whether a reply is what its request asked for.

Four kinds, as in vLLM's benchmark: a JSON schema (the same for all, or one of its own for each), a
grammar, a regular expression, a choice. Replies are checked without any grammar engine: JSON by a
small reader of the few keywords that the schemas use, the grammar by a regular expression of the
same language. All are made up here; nothing is read from a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from quire.errors import ConfigError
from quire.workload.request import WorkloadRequest

FIELD: Final = "structured_outputs"
"""Of the request's body."""
EMAIL: Final = r"[a-z]{2,12}@[a-z]{2,12}\.com"
CHOICES: Final = ("positive", "negative", "neutral")
GRAMMAR: Final = """root ::= "SELECT " column " FROM " table " WHERE " column " = " number
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
number ::= "1" | "2"
"""
SQL: Final = r"SELECT col_[12] FROM table_[12] WHERE col_[12] = [12]"
"""The language of `GRAMMAR`."""
_PERSON: Final = {
    "name": {"type": "string", "maxLength": 24},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "is_member": {"type": "boolean"},
    "role": {"enum": ["admin", "user", "guest"]},
}
Checker = Callable[[str], bool]


def structured_requests(
    kind: str, num: int, output_len: int, ratio: float, seed: int
) -> tuple[list[WorkloadRequest], list[Checker | None]]:
    """Requests of a kind, and for each what says whether a reply is right.

    Args:
        kind: One of `KINDS`.
        num: How many.
        output_len: Tokens at most.
        ratio: Share of the requests that ask for structure, in [0, 1]; the others have no checker.
        seed: Of who asks, and of schemas.

    Raises:
        ConfigError: an unknown kind, or a ratio outside [0, 1].
    """
    if kind not in KINDS:
        raise ConfigError(f"--dataset must be one of {', '.join(KINDS)}, got {kind!r}")
    if not 0 <= ratio <= 1:
        raise ConfigError(f"--structured-output-ratio must be in [0, 1], got {ratio:g}")
    rng = np.random.default_rng(seed)
    asks = np.zeros(num, dtype=bool)
    asks[rng.permutation(num)[: round(num * ratio)]] = True
    requests, checkers = [], []
    for number in range(num):
        prompt, structure, checker = KINDS[kind](number)
        extra: dict[str, Any] = {FIELD: structure} if asks[number] else {}
        requests.append(WorkloadRequest(prompt, len(prompt.split()), output_len, extra=extra))
        checkers.append(checker if asks[number] else None)
    return requests, checkers


def matches_schema(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value fits a schema with the keywords that are used here."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        own = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(own)
            and all(matches_schema(value[key], own[key]) for key in value)
        )
    if kind == "integer":
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return is_int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    return isinstance(value, bool)


def _person(number: int, *, unique: bool) -> tuple[str, dict[str, Any], Checker]:
    own = {f"field_{number}": {"type": "integer", "minimum": 0, "maximum": 999}} if unique else {}
    properties = {**_PERSON, **own}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }

    def is_right(text: str) -> bool:
        try:
            return matches_schema(json.loads(text), schema)
        except ValueError:
            return False

    prompt = f"Describe person number {number} as JSON with {', '.join(properties)}."
    return prompt, {"json": schema}, is_right


def _json(number: int) -> tuple[str, dict[str, Any], Checker]:
    return _person(number, unique=False)


def _json_unique(number: int) -> tuple[str, dict[str, Any], Checker]:
    return _person(number, unique=True)


def _regex(number: int) -> tuple[str, dict[str, Any], Checker]:
    prompt = f"Give the email address of person number {number}."
    return prompt, {"regex": EMAIL}, lambda text: re.fullmatch(EMAIL, text) is not None


def _grammar(number: int) -> tuple[str, dict[str, Any], Checker]:
    prompt = f"Write a SQL query for row {number} of a table."
    return prompt, {"grammar": GRAMMAR}, lambda text: re.fullmatch(SQL, text) is not None


def _choice(number: int) -> tuple[str, dict[str, Any], Checker]:
    prompt = f"Is review number {number} positive, negative or neutral?"
    return prompt, {"choice": list(CHOICES)}, lambda text: text in CHOICES


KINDS: Final[Mapping[str, Callable[[int], tuple[str, dict[str, Any], Checker]]]] = {
    "json": _json,
    "json-unique": _json_unique,
    "grammar": _grammar,
    "regex": _regex,
    "choice": _choice,
}
"""By name, what makes the prompt, the structure and the checker of request number N."""
