"""Arguments of syntaxes that write values without types: each value gets the type that the tool's
schema gives it, and the arguments become the text of a JSON object.

Knows no syntax.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from quire.serving.parsers.json_text import encoded
from quire.serving.parsers.python_text import python_to_json
from quire.serving.tools import ToolSpec

_DEPTH: Final = 8
"""How deep combinations of schemas are followed for the types of one value."""
_JSON_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,),
    "array": (list,), "null": (type(None),),
}  # fmt: skip


def types_of(schema: object, depth: int = _DEPTH) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, dict) or depth == 0:
        return frozenset()
    found = schema.get("type")
    if isinstance(found, str):
        return frozenset((found,))
    if isinstance(found, list):
        return frozenset(name for name in found if isinstance(name, str))
    values = schema.get("enum")
    if isinstance(values, list):
        return frozenset(name for name in (_type_name(value) for value in values) if name)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(inner := schema.get(name), list):
            return frozenset[str]().union(*(types_of(one, depth - 1) for one in inner))
    if "properties" in schema:
        return frozenset(("object",))
    return frozenset()


def _type_name(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    fits = (name for name, kinds in _JSON_TYPES.items() if type(value) in kinds)
    return next(fits, "")


class Arguments:
    """Writes the arguments of one call as a JSON object.

    Args:
        name: The tool that is called.
        tools: Those that are offered.
        out: Told the pieces of the JSON text.
    """

    def __init__(self, name: str, tools: Iterable[ToolSpec], out: Callable[[str], None]) -> None:
        tool = next((tool for tool in tools if tool.name == name), None)
        properties = ((tool and tool.parameters) or {}).get("properties")
        self._properties: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self._out = out
        self._keys: set[str] = set()
        self._types = frozenset[str]()
        self._parts: list[str] = []
        self._muted = False

    def key(self, key: str) -> None:
        """The next argument. One that came before is left out."""
        self._muted = key in self._keys
        self._types = types_of(self._properties.get(key))
        self._parts = []
        if self._muted:
            return
        before = ", " if self._keys else "{"
        self._keys.add(key)
        self._out(f'{before}"{encoded(key)}": ')
        if self._types == {"string"}:
            self._out('"')

    def value(self, text: str) -> None:
        """A piece of its value; nothing is added and nothing is stripped."""
        if self._muted or not text:
            return
        if self._types == {"string"}:
            self._out(encoded(text))
        else:
            self._parts.append(text)

    def end_value(self) -> None:
        """The value is complete."""
        if self._muted:
            return
        if self._types == {"string"}:
            self._out('"')
        else:
            self._out(typed("".join(self._parts), self._types))
        self._parts = []

    def end(self) -> None:
        """The call is complete."""
        self._out("}" if self._keys else "{}")

    @property
    def names(self) -> Sequence[str]:
        """Names of the tool's parameters, in the order of the schema."""
        return list(self._properties)


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that was written without a type.

    A value that has one of the types stays as it is written, or is read as Python if it is that. If
    it has none of them it becomes a string. Without known types, whatever is JSON stays.
    """
    stripped = text.strip()
    wanted = types or frozenset(_JSON_TYPES)
    if _is_one_of(stripped, wanted):
        return stripped
    for name in ("True", "False", "None"):
        if stripped.lower() == name.lower() and _is_one_of(lowered := _AS_JSON[name], wanted):
            return lowered
    if stripped[:1] in ("{", "[", "(") and wanted & {"object", "array"}:
        read = python_to_json(stripped)
        if read is not None and _is_one_of(read, wanted):
            return read
    return f'"{encoded(text)}"'


_AS_JSON: Final = {"True": "true", "False": "false", "None": "null"}


def _is_one_of(text: str, types: frozenset[str]) -> bool:
    """Whether a text is the JSON of a value of one of the types."""
    try:
        value = json.loads(text, parse_int=_Number, parse_float=_Number, parse_constant=_no_value)
    except (ValueError, RecursionError):
        return False
    if isinstance(value, _Number):
        whole = text.lstrip("-").isdecimal()
        return "number" in types or ("integer" in types and whole)
    return _type_name(value) in types


class _Number:
    """A number that is not converted: its digits may be very many."""

    def __init__(self, digits: str) -> None:
        pass


def _no_value(name: str) -> None:
    raise ValueError(name)
