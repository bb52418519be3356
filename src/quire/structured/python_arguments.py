"""Arguments of a Python call with literals, as a grammar: `city="Paris", days=2, tags=["a", None]`.

Strings and numbers are JSON's, which Python reads the same; strings may have single quotes, too.
Lists, dictionaries, `True`, `False` and `None` are Python's. Separators are those of `repr`, so
that models keep the style they learned. What cannot be said in this form is refused. Knows no
llguidance.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from quire.structured import lark
from quire.structured.members import GrammarParts, Member, Root, Schema
from quire.structured.schema import ENFORCED
from quire.structured.value_types import type_name, types_of

MAX_KEY: Final = 256
"""Longest name of an argument that the parser reads."""
_IDENTIFIER: Final = re.compile(r"[^\W\d]\w*")
_FREE_NAME: Final = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_SINGLE: Final = r"(?:[^'\\\x00-\x1F\x7F]|\\[\\'nrt])"
_DOUBLE: Final = r'(?:[^"\\\x00-\x1F\x7F]|\\["\\nrtbf])'
_FREE_KEY: Final = f"/\"{_DOUBLE}{{0,64}}\"|'{_SINGLE}{{0,64}}'/"
_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRINGS: Final = ("pattern", "minLength", "maxLength", "format")
_MOST_ITEMS: Final = 1024
"""Most items of a list that has a longest or shortest length."""


def python_arguments(schema: Schema, parts: GrammarParts) -> str:
    """The arguments of one call, as an expression of Lark.

    Args:
        schema: Of the arguments, an object, with llguidance's options.
        parts: Gets the rules.

    Raises:
        InvalidRequest: something that the schema asks for cannot be written so.
    """
    return _Python(Root(schema), parts).write()


class _Python:
    """Writes one grammar."""

    def __init__(self, root: Root, parts: GrammarParts) -> None:
        self._root = root
        self._parts = parts
        self._refs: dict[str, str] = {}
        self._undefined: list[tuple[str, Schema, str]] = []
        """Rules of references: a long chain of them is not followed by calls within calls."""
        self._any_name = ""
        flexible = root.options["whitespace_flexible"]
        self._comma, self._colon = ('", "', '": "') if flexible else ('","', '":"')

    def write(self) -> str:
        part = self._root.resolve(self._root.schema, "#")
        for keyword in ("anyOf", "oneOf", "allOf", "enum", "const"):
            if keyword in part:
                self._root.refuse("#", repr(keyword))
        members, extra = self._root.members(part, "#")
        items = []
        for member in members:
            name = member.name
            if len(name) > MAX_KEY or not _IDENTIFIER.fullmatch(name) or not _begins_name(name):
                self._root.refuse(member.where, f"the name {name[:80]!r}")
            items.append((f"{lark.string(name + '=')} {self._member(member)}", member.required))
        other = None
        if extra is not None:
            names = [lark.string(member.name) for member in members]
            key = _FREE_NAME + (f" & ~({' | '.join(names)})" if names else "")
            value = self._value(extra, "#/additionalProperties")
            name = self._parts.terminal(f'({key}) "="')
            other = self._parts.rule(f"{name} {value}")
        start = self._chain(items, other)
        while self._undefined:
            name, target, where = self._undefined.pop()
            self._parts.define(name, self._value(target, where))
        return start

    def _member(self, member: Member) -> str:
        return self._value(member.schema, member.where)

    def _chain(self, items: list[tuple[str, bool]], other: str | None) -> str:
        """Items with commas between them, each required or not, and then any number of others."""
        rule, comma = self._parts.rule, self._comma
        rest = f"({comma} {other})*" if other else ""
        first = f"({other} {rest})?" if other else ""
        for text, required in reversed(items):
            item = rule(text)
            whole = f"{item} {rest}".rstrip()
            after = f"{comma} {item}" if required else f"({comma} {item})?"
            if required:
                first = whole
            else:
                first = rule(f"{whole} | {first}") if first else f"({rule(whole)})?"
            rest = rule(f"{after} {rest}".rstrip())
        return first or '""'

    def _value(self, part: Any, where: str) -> str:
        if isinstance(part, dict) and isinstance(ref := part.get("$ref"), str):
            target = self._root.resolve(part, where)
            if ref not in self._refs:
                self._refs[ref] = self._parts.rule(None)
                self._undefined.append((self._refs[ref], target, ref))
            return self._refs[ref]
        part = self._root.resolve(part, where)
        said = {name for name in part if name in ENFORCED}
        if not said:
            return self._any()
        for kind in ("anyOf", "oneOf", "allOf"):
            if kind in said:
                return self._combined(part, kind, said, where)
        if "enum" in said or "const" in said:
            return self._values(part, said, where)
        types = types_of(part)
        if not types:
            self._root.refuse(where, "no type", "a value's type must be told here")
        types -= {"integer"} if "number" in types else set()
        ways = [self._of_type(name, part, where) for name in sorted(types)]
        return f"({' | '.join(ways)})"

    def _combined(self, part: Schema, kind: str, said: set[str], where: str) -> str:
        if said != {kind} or kind == "allOf":
            self._root.refuse(where, repr(kind))
        if kind == "oneOf":
            seen: set[str] = set()
            for one in part[kind]:
                types = set(types_of(one, self._root.schema))
                types |= {"integer"} if "number" in types else set()
                if not types or types & seen:
                    self._root.refuse(where, "'oneOf' of ways that their types do not tell apart")
                seen |= types
        ways = [self._value(one, f"{where}/{kind}/{i}") for i, one in enumerate(part[kind])]
        return f"({' | '.join(ways)})"

    def _values(self, part: Schema, said: set[str], where: str) -> str:
        """The values of `enum` or `const`."""
        beside = said - {"type", "enum", "const"}
        if beside or {"enum", "const"} <= said:
            self._root.refuse(where, f"'enum' or 'const' beside {min(beside, default='the other')}")
        types = types_of({"type": part["type"]}) if "type" in part else None
        found = []
        for value in [part["const"]] if "const" in part else part["enum"]:
            name = type_name(value)
            if types is None or name in types or (name == "integer" and "number" in types):
                found.append(self._literal(value))
        if not found:
            self._root.refuse(where, "no value of its type")
        return f"({' | '.join(found)})"

    def _literal(self, value: Any) -> str:
        """One value; made of the same lexemes as others, because no lexeme is ever read again."""
        if isinstance(value, str):
            double = json.dumps(value, ensure_ascii=False)
            single = double[1:-1].replace('\\"', '"').replace("'", "\\'")
            return f"({lark.string(double)} | {lark.string(chr(39) + single + chr(39))})"
        if isinstance(value, list):
            inner = f" {self._comma} ".join(self._literal(one) for one in value)
            return f'("[" {inner} "]")'
        if isinstance(value, dict):
            pairs = [
                f"{self._literal(k)} {self._colon} {self._literal(v)}" for k, v in value.items()
            ]
            inner = f" {self._comma} ".join(pairs)
            return f'("{{" {inner} "}}")'
        words = {True: '"True"', False: '"False"', None: '"None"'}
        if value is None or isinstance(value, bool):
            return words[value]
        return lark.string(json.dumps(value))

    def _of_type(self, name: str, part: Schema, where: str) -> str:
        if name == "string":
            return self._string(part, where)
        if name in ("integer", "number"):
            kept: Schema = {key: part[key] for key in _NUMBERS if key in part}
            return self._root.leaf({"type": name, **kept}, where)
        if name == "boolean":
            return '("True" | "False")'
        if name == "null":
            return '"None"'
        if name == "array":
            return self._array(part, where)
        if name == "object":
            return self._object(part, where)
        self._root.refuse(where, f"the type {name[:80]!r}", "there is no such type")

    def _string(self, part: Schema, where: str) -> str:
        kept: Schema = {key: part[key] for key in _STRINGS if key in part}
        double = self._root.leaf({"type": "string", **kept}, where)
        if "pattern" in kept or "format" in kept:
            return double
        least, most = kept.get("minLength", 0), kept.get("maxLength", "")
        return f"({double} | /'{_SINGLE}{{{least},{most}}}'/)"

    def _object(self, part: Schema, where: str) -> str:
        members, extra = self._root.members(part, where)
        items = [
            (f"{self._literal(one.name)} {self._colon} {self._member(one)}", one.required)
            for one in members
        ]
        other = None
        if extra is not None:
            names = [self._literal(one.name) for one in members]
            key = _FREE_KEY + (f" & ~({' | '.join(names)})" if names else "")
            value = self._value(extra, f"{where}/additionalProperties")
            other = self._parts.rule(f"{self._parts.terminal(key)} {self._colon} {value}")
        return f'("{{" {self._chain(items, other)} "}}")'

    def _array(self, part: Schema, where: str) -> str:
        firsts, items = part.get("prefixItems", []), part.get("items", True)
        if isinstance(items, list):
            firsts, items = items, part.get("additionalItems", True)
        least, most = part.get("minItems", 0), part.get("maxItems")
        if max(least, most or 0, len(firsts)) > _MOST_ITEMS:
            self._root.refuse(where, f"over {_MOST_ITEMS} items in a list of limited length")
        if items is False:
            most = len(firsts) if most is None else min(most, len(firsts))
        if most is not None and least > most:
            self._root.refuse(where, f"'minItems' {least}", f"there are at most {most}")
        firsts = firsts[:most]
        rest = self._repeated(items, len(firsts), least, most, where)
        for i in reversed(range(len(firsts))):
            item = self._value(firsts[i], f"{where}/prefixItems/{i}")
            before = f"{self._comma} " if i else ""
            text = f"{before}{item} {rest}".rstrip()
            rest = self._parts.rule(text) + ("" if i < least else "?")
        return f'("[" {rest} "]")'

    def _repeated(self, items: Any, done: int, least: int, most: int | None, where: str) -> str:
        """The items after the first ones, which have schemas of their own."""
        if most is not None and most <= done:
            return ""
        item = self._parts.rule(self._value(items, f"{where}/items"))
        low = max(least - done, 0)
        if done:
            return f"({self._comma} {item}){{{low},{'' if most is None else most - done}}}"
        if most == 1:
            return item if low else f"{item}?"
        high = "" if most is None else most - 1
        rest = f"({self._comma} {item}){{{max(low - 1, 0)},{high}}}"
        return f"({item} {rest}){'' if low else '?'}"

    def _any(self) -> str:
        """Any literal."""
        if self._any_name:
            return self._any_name
        name = self._any_name = self._parts.rule(None)
        text, key = self._string({}, "#"), self._parts.terminal(_FREE_KEY)
        pair = self._parts.rule(f"{key} {self._colon} {name}")
        ways = (
            text, self._root.leaf({"type": "number"}, "#"), '"True"', '"False"', '"None"',
            f'"[" ({name} ({self._comma} {name})*)? "]"',
            f'"{{" ({pair} ({self._comma} {pair})*)? "}}"',
        )  # fmt: skip
        self._parts.define(name, " | ".join(ways))
        return name


def _begins_name(name: str) -> bool:
    """Whether the parser takes the first character for that of a name."""
    return name[0].isalpha() or name[0] == "_"
