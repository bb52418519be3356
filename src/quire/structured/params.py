"""What a request may say about the form of its output, and the one form that is made of it.

`StructuredOutputsParams` is vLLM's class: six kinds of constraint, of which exactly one is given,
and options for JSON. The input gate turns it into a `Grammar`, and everything behind the gate knows
only that. Values are checked on construction as far as that is cheap; what a grammar says is
checked where it is compiled. Knows no tokenizer and no llguidance.
"""

from __future__ import annotations

import json as json_text
from typing import Any, Final

import msgspec

from quire.bounds import show
from quire.errors import InvalidRequest

KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The kinds of constraint, of which a request gives one."""
OPTIONS: Final = (
    "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "reasoning",
)  # fmt: skip
MAX_GRAMMAR_CHARS: Final = 262_144
"""Characters of a schema, a regex, a grammar, a structural tag, or all choices together."""
MAX_CHOICES: Final = 16_384
MAX_WHITESPACE_CHARS: Final = 256
MAX_MARK_CHARS: Final = 256
"""Characters of a mark around reasoning."""
MAX_SCHEMA_DEPTH: Final = 64
"""Nested objects and lists in a schema or a structural tag."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A constraint as everything behind the input gate knows it."""

    kind: str
    """One of `KINDS`, for logs and for people."""
    text: str
    """llguidance's own form. Equal texts are equal grammars, so it is the key of every cache."""


class FreeReasoning(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Free text that comes before the part of an output that has a form.

    Raises:
        InvalidRequest: a mark is too long, or one of the first two is empty.
    """

    opening: str
    closing: str
    answer: str = ""
    """What begins the answer, with or without reasoning before it."""
    is_open: bool = False
    """The prompt ends within the reasoning."""
    may_open: bool = True
    """The model may begin to reason, or else give its answer at once."""

    def __post_init__(self) -> None:
        for name in ("opening", "closing", "answer"):
            mark = getattr(self, name)
            if name != "answer" or mark:
                _check_text(f"reasoning.{name}", mark, MAX_MARK_CHARS)
        for name in ("is_open", "may_open"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(f"reasoning.{name}", "true or false", getattr(self, name))

    @classmethod
    def read(cls, given: object) -> FreeReasoning | None:
        """An object of this class, its fields as a dictionary, or nothing.

        Raises:
            InvalidRequest: it is none of these, or a field is missing, unknown or wrong.
        """
        if given is None or isinstance(given, cls):
            return given
        fields = cls.__struct_fields__
        if not isinstance(given, dict) or not {"opening", "closing"} <= given.keys() <= {*fields}:
            rule = f"an object of opening, closing and perhaps {', '.join(fields[2:])}"
            raise _bad("reasoning", rule, given)
        return cls(**given)


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form that an output must have.

    Exactly one of the first six fields is given. Names and meanings are vLLM's, but for
    `reasoning`.

    Raises:
        InvalidRequest: none or several of them are given, or a value is of the wrong type or too
            long; the message names the limit.
    """

    json: Any = None
    """A JSON schema: an object, or its text."""
    regex: str | None = None
    """A regular expression that the whole output must match; the syntax is that of Rust's `regex`,
    without look-around and back-references."""
    choice: list[str] | None = None
    """The output is one of these strings."""
    grammar: str | None = None
    """A context-free grammar: Lark with a rule `start`, or, where rules are written with `::=`,
    EBNF or llama.cpp's GBNF with a rule `root`."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: Any = None
    """Free text with constrained sections: an object of `type` "structural_tag", or its text."""
    disable_any_whitespace: bool = False
    """JSON without any whitespace between its tokens."""
    disable_additional_properties: bool = False
    """Objects of a schema that names properties have only these, unless it says otherwise."""
    whitespace_pattern: str | None = None
    """Which whitespace may stand between two tokens of JSON, as a regular expression. Without it
    there are at most 8 characters in a row, so that an output cannot go on with newlines for ever.
    """
    reasoning: FreeReasoning | None = None
    """What may come before, in any form: the reasoning of a model. A server fills it in where a
    parser of reasoning is in force. It may be given as a dictionary."""

    def __post_init__(self) -> None:
        self._drop_nothing()
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            got = ", ".join(given) or "none"
            raise _wrong(f"must have exactly one of {', '.join(KINDS)}, got {got}.")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, "true or false", getattr(self, name))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name), MAX_GRAMMAR_CHARS)
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                _set(self, name, _read_object(name, getattr(self, name)))
        if self.choice is not None:
            _set(self, "choice", _read_choices(self.choice))
        if self.whitespace_pattern is not None:
            _check_text("whitespace_pattern", self.whitespace_pattern, MAX_WHITESPACE_CHARS)
        _set(self, "reasoning", FreeReasoning.read(self.reasoning))

    def _drop_nothing(self) -> None:
        """Values that ask for nothing count as absent; as in vLLM, `json_object` false is one."""
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise _bad("json_object", "true or false", self.json_object)
        if self.json_object is False:
            _set(self, "json_object", None)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, name) is None:
                _set(self, name, False)

    @property
    def kind(self) -> str:
        """Which of `KINDS` is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def all_constraints_none(self) -> bool:
        """Never true: an object without a constraint cannot be made. vLLM has this method."""
        return False

    @classmethod
    def read(cls, given: object) -> StructuredOutputsParams | None:
        """What a caller gave as `structured_outputs`: an object of this class, its fields as a
        dictionary, or nothing.

        Raises:
            InvalidRequest: it is neither, or a field is unknown or wrong.
        """
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, dict):
            raise InvalidRequest(
                "structured_outputs must be StructuredOutputsParams or an object of its fields, "
                f"got {show(given)}.",
                param="structured_outputs",
            )
        known = (*KINDS, *OPTIONS)
        for name in given:
            if name not in known:
                raise _wrong(f"has no field {show(name)}; its fields are {', '.join(known)}.")
        return cls(**given)


def _read_object(name: str, given: object) -> dict[str, Any] | bool:
    """A JSON object, given as one or as its text."""
    if isinstance(given, str):
        _check_text(name, given, MAX_GRAMMAR_CHARS)
        try:
            given = json_text.loads(given, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise _bad(name, "a JSON object or its text", "text that is not JSON") from None
    else:
        _check_size(name, given)
    if not isinstance(given, dict):
        raise _bad(name, "a JSON object or its text", given)
    _check_depth(name, given)
    return given


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _check_size(name: str, given: object) -> None:
    try:
        length = len(json_text.dumps(given, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise _bad(name, "a JSON object or its text", given) from None
    if length > MAX_GRAMMAR_CHARS:
        raise _bad(name, f"at most {MAX_GRAMMAR_CHARS} characters of JSON", length)


def _check_depth(name: str, given: object) -> None:
    """Nesting is limited, so that nothing behind this can run out of stack."""
    level, values = 0, [given]
    while values:
        level += 1
        if level > MAX_SCHEMA_DEPTH + 1:
            raise _bad(name, f"nested at most {MAX_SCHEMA_DEPTH} levels deep", "more")
        inner: list[object] = []
        for value in values:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, (list, tuple)):
                inner += value
        values = inner


def _read_choices(given: object) -> list[str]:
    if not isinstance(given, (list, tuple)) or not given:
        raise _bad("choice", "a list of at least one string", given)
    if len(given) > MAX_CHOICES:
        raise _bad("choice", f"a list of at most {MAX_CHOICES} strings", len(given))
    for text in given:
        if not isinstance(text, str) or not text:
            raise _bad("choice", "made of non-empty strings", text)
        _check_text("choice", text, MAX_GRAMMAR_CHARS)
    length = sum(map(len, given))
    if length > MAX_GRAMMAR_CHARS:
        raise _bad("choice", f"at most {MAX_GRAMMAR_CHARS} characters in all", length)
    return list(given)


def _check_text(name: str, text: object, most: int) -> None:
    if not isinstance(text, str) or not text:
        raise _bad(name, "a non-empty string", text)
    if len(text) > most:
        raise _bad(name, f"at most {most} characters", len(text))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"a lone surrogate at position {error.start}"
        raise _bad(name, "text that can be written as UTF-8", where) from None


def _wrong(text: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs {text}", param="structured_outputs")


def _bad(name: str, rule: str, given: object) -> InvalidRequest:
    param = f"structured_outputs.{name}"
    return InvalidRequest(f"{param} must be {rule}, got {show(given)}.", param=param)


_set: Final = msgspec.structs.force_setattr
