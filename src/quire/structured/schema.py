"""JSON schemas: which keywords can be enforced, and what options do to a schema.

llguidance names most keywords that it cannot enforce, and ignores some. A request with a schema of
which a part would be ignored is refused here, with the keyword and where it stands, because its
output could be invalid. Knows no llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from quire.errors import InvalidRequest

ENFORCED: Final = frozenset((
    "$ref", "type", "enum", "const", "anyOf", "oneOf", "allOf",
    "properties", "required", "additionalProperties", "patternProperties", "minProperties",
    "maxProperties", "items", "prefixItems", "minItems", "maxItems", "additionalItems",
    "minLength", "maxLength", "pattern", "format",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
))  # fmt: skip
REFUSED: Final = frozenset((
    "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies",
    "propertyNames", "unevaluatedProperties", "unevaluatedItems", "contains", "minContains",
    "maxContains", "uniqueItems", "$dynamicRef", "$recursiveRef", "extends", "disallow",
    "divisibleBy", "contentSchema", "$vocabulary",
))  # fmt: skip
"""Keywords of JSON Schema, old drafts included, that restrict a value and cannot be enforced."""
_OF_ONE: Final = ("additionalProperties", "additionalItems", "items")
_OF_MANY: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_OF_NAMES: Final = ("properties", "patternProperties", "$defs", "definitions")
_HARMLESS: Final = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}
"""Values with which a keyword that cannot be enforced asks for nothing."""
PARAM: Final = "structured_outputs.json"
OPTIONS_KEY: Final = "x-guidance"
"""llguidance's own options within a schema."""


def schema_text(schema: dict[str, Any], *, close_objects: bool) -> str:
    """A schema as the text that is compiled.

    Args:
        schema: As the request gave it.
        close_objects: Objects with `properties` have no others, unless the schema says so.

    Raises:
        InvalidRequest: a keyword cannot be enforced; the message says where it stands.
    """
    for where, part in subschemas(schema):
        _check_keywords(where, part)
    schema = json.loads(json.dumps(schema))  # the caller's stays as it is
    for _, part in subschemas(schema):
        for name in _HARMLESS:
            part.pop(name, None)
        if close_objects and "properties" in part and "patternProperties" not in part:
            part.setdefault("additionalProperties", False)
    return json.dumps(schema, ensure_ascii=False)


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each schema within a schema, itself first, with its JSON pointer."""
    todo: list[tuple[str, Any]] = [("#", schema)]
    while todo:
        where, part = todo.pop()
        if not isinstance(part, dict):
            continue  # true and false are schemas, too; other values are refused when compiled
        yield where, part
        for name in _OF_NAMES:
            if isinstance(inner := part.get(name), dict):
                todo += [(f"{where}/{name}/{_escape(key)}", inner[key]) for key in inner]
        for name in _OF_MANY:
            if isinstance(inner := part.get(name), list):
                todo += [(f"{where}/{name}/{i}", one) for i, one in enumerate(inner)]
        todo += [(f"{where}/{name}", part[name]) for name in _OF_ONE if name in part]


def _check_keywords(where: str, part: dict[str, Any]) -> None:
    for name in part:
        if name == OPTIONS_KEY:
            raise _refused(where, name, "options are fields of structured_outputs")
        if name in REFUSED and part[name] != _HARMLESS.get(name, _HARMLESS):
            raise _refused(where, name, "it cannot be enforced while text is generated")
    if isinstance(part.get("$ref"), str) and not part["$ref"].startswith("#"):
        raise _refused(where, "$ref", "only references within the schema are followed")


def _refused(where: str, keyword: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{PARAM}: {_short(where)} has the keyword {keyword!r}: {why}.", param=PARAM
    )


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _short(where: str) -> str:
    return where if len(where) <= 200 else f"{where[:100]}...{where[-97:]}"
