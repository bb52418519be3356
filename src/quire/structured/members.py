"""What the grammars of calls that are not JSON share: the members of an object, references, and how
a schema that a syntax cannot express is refused. Knows no syntax and no llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from quire.errors import InvalidRequest
from quire.structured.schema import ENFORCED, OPTIONS_KEY, PARAM, subschemas
from quire.structured.value_types import pointed

Schema = dict[str, Any]
_MOST_REFS: Final = 64
"""References in a row that are followed: a longer chain is a circle."""
_MOST_CHARS: Final = 2**20
"""Characters of all schemas that one grammar holds as JSON."""
_UNCOUNTED: Final = ("patternProperties", "minProperties", "maxProperties")
_WHOLE: Final = "whole"


class GrammarParts(Protocol):
    """Where the pieces of one grammar are collected."""

    def rule(self, body: str | None, *, lazy: bool = False) -> str:
        """A new rule, and its name. Without a body it is defined later."""
        ...

    def define(self, name: str, body: str) -> None:
        """The body of a rule that was made without one."""
        ...

    def terminal(self, body: str) -> str:
        """A new terminal, and its name: one lexeme, which may be an intersection."""
        ...

    def literal(self, text: str) -> str:
        """A text, in which special tokens are tokens."""
        ...

    def parted(self, text: str) -> tuple[str, str]:
        """A text before its first special token, and the rest as an expression."""
        ...


@dataclass(frozen=True)
class Member:
    """One named value of an object."""

    name: str
    schema: Any
    where: str
    required: bool


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _schemas(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, (dict, bool)) for one in value)


def _ways(value: Any) -> bool:
    return _schemas(value) and bool(value)


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_SHAPES: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), ("a list of at least one schema", _ways)),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        ("a count", _count),
    ),
    **dict.fromkeys(
        ("pattern", "format", "$ref"), ("a string", lambda value: isinstance(value, str))
    ),
    "prefixItems": ("a list of schemas", _schemas),
    "items": ("a schema or a list of them", lambda v: isinstance(v, (dict, bool)) or _schemas(v)),
    "enum": ("a list of values", lambda value: isinstance(value, list) and bool(value)),
    "required": ("a list of strings", _words),
    "type": ("a string or a list of them", lambda value: isinstance(value, str) or _words(value)),
    "properties": ("an object", lambda value: isinstance(value, dict)),
}
"""What the keywords that are read here must be: the rule, and whether a value keeps it."""


class Root:
    """A tool's schema, and what is found in it.

    Args:
        schema: All keywords of it can be enforced in JSON; with llguidance's options.
    """

    def __init__(self, schema: Schema) -> None:
        self.options = schema[OPTIONS_KEY]
        self.schema = {key: schema[key] for key in schema if key != OPTIONS_KEY}
        self._chars = 0
        for where, part in subschemas(self.schema):
            self._check(where, part)

    def _check(self, where: str, part: Schema) -> None:
        """Values of keywords have the types that JSON Schema gives them."""
        for name, (rule, fits) in _SHAPES.items():
            if name in part and not fits(part[name]):
                self.refuse(where, f"{name!r}", f"it must be {rule}")

    def refuse(self, where: str, keyword: str, why: str = "") -> NoReturn:
        """Refuse what the syntax cannot express.

        Raises:
            InvalidRequest: always; it names the keyword and its place.
        """
        raise InvalidRequest(
            f"{PARAM}: {where[:200]} has {keyword}: "
            f"{why or 'the syntax in which this model writes calls cannot express it'}.",
            param=PARAM,
        )

    def resolve(self, part: Any, where: str) -> Schema:
        """A schema that is no reference and no `allOf` of one. True becomes an empty one."""
        for _ in range(_MOST_REFS):
            if part is True:
                return {}
            if not isinstance(part, dict):
                self.refuse(where, "no schema", "a schema must be an object here")
            alone = {name for name in part if name in ENFORCED}
            if "$ref" in part:
                if len(alone) > 1:
                    beside = ", ".join(sorted(alone - {"$ref"}))
                    self.refuse(where, f"'$ref' beside {beside}")
                part = self.follow(part["$ref"], where)
            elif "allOf" in part and len(alone) == 1 and len(part["allOf"]) == 1:
                part = part["allOf"][0]
            else:
                return part
        self.refuse(where, "'$ref' that leads to itself", "it says nothing")

    def follow(self, ref: Any, where: str) -> Any:
        """What a reference points to."""
        found = pointed(self.schema, ref) if isinstance(ref, str) else None
        if found is None:
            self.refuse(where, f"the reference {str(ref)[:80]!r}", "it points to nothing here")
        return found

    def members(self, part: Schema, where: str) -> tuple[list[Member], Any]:
        """The members of an object in the order of the schema, and the schema of others; `None`:
        it has no others."""
        for name in _UNCOUNTED:
            if name in part and not (name == "minProperties" and part[name] == 0):
                self.refuse(where, repr(name))
        extra = part.get("additionalProperties", True)
        extra = None if extra is False else extra
        properties: Schema = part.get("properties") or {}
        required: Sequence[str] = part.get("required") or ()
        found = [
            Member(name, properties[name], f"{where}/properties/{name}", name in required)
            for name in properties
            if properties[name] is not False or name in required
        ]
        for name in dict.fromkeys(required):
            if name not in properties:
                if extra is None:
                    self.refuse(where, f"{name[:80]!r} in 'required'", "it excludes it elsewhere")
                found.append(Member(name, extra, f"{where}/additionalProperties", True))
        return found, extra

    def leaf(self, part: Schema, where: str) -> str:
        """A value in JSON."""
        part = {key: part[key] for key in part if key not in ("$defs", "definitions")}
        if "properties" in part:
            part.setdefault("type", "object")
        if any(True for _ in _references(part)):
            part = _renamed(part) | {"$defs": {_WHOLE: _renamed(self.schema)}}
        text = json.dumps({**part, OPTIONS_KEY: self.options})
        self._chars += len(text)
        if self._chars > _MOST_CHARS:
            self.refuse(where, "too many references", f"they make over {_MOST_CHARS} characters")
        return f"%json {text}"


def _references(part: Any) -> Iterator[str]:
    todo = [part]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            if isinstance(ref := one.get("$ref"), str):
                yield ref
            todo += one.values()
        elif isinstance(one, list):
            todo += one


def _renamed(part: Any) -> Any:
    """A schema whose references point into the whole schema, which is a definition there."""
    if isinstance(part, list):
        return [_renamed(one) for one in part]
    if not isinstance(part, dict):
        return part
    out = {key: _renamed(value) for key, value in part.items()}
    if isinstance(ref := part.get("$ref"), str):
        out["$ref"] = f"#/$defs/{_WHOLE}{ref[1:]}"
    return out
