"""Which JSON types a schema allows, for syntaxes that write values without quotes around strings.

The grammar of such a syntax and its parser both ask here, so they agree on what a text means. Says
"not known" where a schema does not tell; never fails, whatever it is given. Knows no grammar.
"""

from __future__ import annotations

import re
from typing import Any, Final

_DEPTH: Final = 8
"""How deep references and combinations of schemas are followed for the types of one value."""
_STEPS: Final = 512
"""How many schemas are looked at for them."""
_NUMBER: Final = r"-?(?:0|[1-9][0-9]*)"
READS: Final[dict[str, str]] = {
    "null": "null",
    "boolean": "(?:true|false)",
    "integer": _NUMBER,
    "number": rf"{_NUMBER}(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?",
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
}
"""Where a value is a string or something else: the texts that are that something else, as regular
expressions in the syntax that Python and Rust share."""
_READ: Final = {name: re.compile(pattern) for name, pattern in READS.items()}
_NAMES: Final[dict[type, str]] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object",
    list: "array", type(None): "null",
}  # fmt: skip


def type_name(value: Any) -> str:
    """The JSON type of a value; empty if it is none."""
    return _NAMES.get(type(value), "")


def types_of(schema: object, root: object = None) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it does not say.

    Args:
        schema: Any part of `root`.
        root: What references point into.
    """
    return _Types(root).of(schema, _DEPTH)


class _Types:
    """Follows references and combinations, as far as it takes few steps: a small schema may have
    very many ways."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._left = _STEPS

    def of(self, schema: object, depth: int) -> frozenset[str]:
        self._left -= 1
        if not isinstance(schema, dict) or depth == 0 or self._left < 0:
            return frozenset()
        if isinstance(ref := schema.get("$ref"), str):
            return self.of(pointed(self._root, ref), depth - 1)
        found = schema.get("type")
        if isinstance(found, str):
            return frozenset((found,))
        if isinstance(found, list):
            return frozenset(name for name in found if isinstance(name, str))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return frozenset(name for name in map(type_name, values) if name)
        return self._combined(schema, depth - 1)

    def _combined(self, schema: dict[str, Any], depth: int) -> frozenset[str]:
        for name in ("anyOf", "oneOf"):
            if isinstance(inner := schema.get(name), list):
                each = [self.of(one, depth) for one in inner]
                return frozenset[str]().union(*each) if all(each) else frozenset()
        if isinstance(inner := schema.get("allOf"), list):
            known = [types for one in inner if (types := self.of(one, depth))]
            return frozenset.intersection(*known) if known else frozenset()
        return frozenset(("object",)) if "properties" in schema else frozenset()


def pointed(root: object, ref: str) -> Any:
    """What a reference within a schema points to; `None` if it is no pointer, or to nothing."""
    if not (ref == "#" or ref.startswith("#/")):
        return None
    found: Any = root
    for name in ref.split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key[:9]) < len(found):
            found = found[int(key[:9])]
        else:
            return None
    return found


def reads_as_other(text: str, types: frozenset[str]) -> bool:
    """Whether a text is no string, where a value may be a string or one of `types`."""
    return any(_READ[name].fullmatch(text) is not None for name in types if name in _READ)
