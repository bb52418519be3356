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
from quire.structured.value_types import READS, reads_as_other, type_name, types_of

_ALL_TYPES: Final = frozenset(READS)


class Arguments:
    """Writes the arguments of one call as a JSON object.

    Args:
        name: The tool that is called.
        tools: Those that are offered.
        out: Told the pieces of the JSON text.
        held: A grammar holds the call to the tool's schema.
    """

    def __init__(
        self,
        name: str,
        tools: Iterable[ToolSpec],
        out: Callable[[str], None],
        *,
        held: bool = False,
    ) -> None:
        tool = next((tool for tool in tools if tool.name == name), None)
        self._schema = (tool and tool.parameters) or {}
        properties = self._schema.get("properties")
        self._properties: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self._out = out
        self._held = held
        self._keys: set[str] = set()
        self._types = frozenset[str]()
        self._parts: list[str] = []
        self._muted = False

    def key(self, key: str) -> None:
        """The next argument. One that came before is left out."""
        self._muted = key in self._keys
        schema = self._properties.get(key, self._schema.get("additionalProperties"))
        self._types = types_of(schema, self._schema)
        self._parts = []
        if self._muted:
            return
        before = ", " if self._keys else "{"
        self._keys.add(key)
        self._out(f'{before}"{encoded(key)}": ')
        if self._types == {"string"}:
            self._out('"')

    def is_json(self, first: str) -> bool:
        """Whether a value with this first character is certainly an object or a list in JSON."""
        kind = {"{": "object", "[": "array"}.get(first)
        return self._held and not self._muted and kind in self._types

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
            read = exact if self._held and self._types else typed
            self._out(read("".join(self._parts), self._types))
        self._parts = []

    def end(self) -> None:
        """The call is complete."""
        self._out("}" if self._keys else "{}")

    @property
    def names(self) -> Sequence[str]:
        """Names of the tool's parameters, in the order of the schema."""
        return list(self._properties)


def exact(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that a grammar holds to some types, which are known."""
    is_text = "string" in types and not reads_as_other(text, types)
    return f'"{encoded(text)}"' if is_text else text


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that was written without a type.

    A value that has one of the types stays as it is written, or is read as Python if it is that. If
    it has none of them it becomes a string. Without known types, whatever is JSON stays.
    """
    stripped = text.strip()
    wanted = types or _ALL_TYPES
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
    return type_name(value) in types


class _Number:
    """A number that is not converted: its digits may be very many."""

    def __init__(self, digits: str) -> None:
        pass


def _no_value(name: str) -> None:
    raise ValueError(name)
