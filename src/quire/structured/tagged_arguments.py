"""Arguments between tags, without types, as a grammar: what Qwen 3 Coder and GLM 4.5 write.

A string is its raw text up to the closing tag; any other value is JSON. A text in which a string
could be taken for another type is read as that type (`value_types.READS`), so the grammar allows it
only where that type is allowed. What the tags cannot carry is refused. Knows no llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from quire.structured import lark
from quire.structured.members import GrammarParts, Member, Root, Schema
from quire.structured.raw_strings import ANY, KEYWORDS, raw_string
from quire.structured.schema import ENFORCED
from quire.structured.value_types import READS, reads_as_other, type_name, types_of

MAX_KEY: Final = 256
"""Longest name of an argument that the parsers read."""
_KEY: Final = re.compile(r"[^<>\s](?:[^<>\n\r]*[^<>\s])?")
_FREE_KEY: Final = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
"""What the model may call an argument that the schema does not name."""
_LIMITS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COMBINE: Final = ("anyOf", "oneOf", "allOf", "$ref")
_STARTS: Final = {"integer": "/[-0-9](?s:.*)/", "number": "/[-0-9](?s:.*)/"}
"""What a string does not begin with where a number of limited range is allowed as well."""


@dataclass(frozen=True)
class Tags:
    """What is around a name and around a value, and after both."""

    before: str
    between: tuple[str, ...]
    mark: str
    """The closing tag, where the parser ends a value."""
    close: str
    """What the value ends with: the mark, and perhaps something before it."""
    after: str
    """An expression."""
    first: str = ""
    """An expression for what may come before all arguments."""


_NEWLINE: Final = r'"\n"?'
QWEN: Final = Tags("<parameter=", (">\n",), "</parameter>", "\n</parameter>", r'"\n"')
GLM: Final = Tags(
    "<arg_key>", ("</arg_key>", _NEWLINE, "<arg_value>"), "</arg_value>", "</arg_value>", _NEWLINE,
    _NEWLINE,
)  # fmt: skip


def tagged_arguments(schema: Schema, parts: GrammarParts, tags: Tags) -> str:
    """The arguments of one call, as an expression of Lark.

    Args:
        schema: Of the arguments, an object, with llguidance's options.
        parts: Gets the rules.
        tags: How the syntax writes them.

    Raises:
        InvalidRequest: the tags cannot carry something that the schema asks for.
    """
    return _Tagged(Root(schema), parts, tags).write()


class _Tagged:
    """Writes one grammar."""

    def __init__(self, root: Root, parts: GrammarParts, tags: Tags) -> None:
        self._root = root
        self._parts = parts
        self._tags = tags
        self._unlike = f"~/(?s:.*){re.escape(tags.mark).replace('/', chr(92) + '/')}(?s:.*)/"

    def write(self) -> str:
        part = self._root.resolve(self._root.schema, "#")
        _only_object(self._root, part)
        members, extra = self._root.members(part, "#")
        out = []
        for member in members:
            one = self._parts.rule(self._member(member))
            out.append(one if member.required else f"{one}?")
        if extra is not None:
            out.append(f"{self._parts.rule(self._others(members, extra))}*")
        return " ".join((self._tags.first, *out)).strip() or '""'

    def _member(self, member: Member) -> str:
        name, where = member.name, member.where
        if len(name) > MAX_KEY or not _KEY.fullmatch(name):
            self._root.refuse(where, f"the name {name[:80]!r}")
        tags = self._tags
        begin = self._parts.literal(tags.before + name + tags.between[0])
        return " ".join((begin, *self._rest(tags.between[1:]), self._value(member), tags.after))

    def _others(self, members: list[Member], extra: Any) -> str:
        """An argument that the schema does not name."""
        tags, key = self._tags, _FREE_KEY
        if members:
            key += f" & ~({' | '.join(lark.string(member.name) for member in members)})"
        plain, special = self._parts.parted(tags.before)
        last, rest = self._parts.parted(tags.between[0])
        words = (lark.string(plain) if plain else "", f"({key})", lark.string(last) if last else "")
        name = self._parts.terminal(" ".join(word for word in words if word))
        value = self._value(Member("", extra, "#/additionalProperties", False))
        return " ".join((special, name, rest, *self._rest(tags.between[1:]), value, tags.after))

    def _rest(self, between: tuple[str, ...]) -> list[str]:
        return [text if text == _NEWLINE else self._parts.literal(text) for text in between]

    def _value(self, member: Member) -> str:
        """A value and what closes it."""
        where = member.where
        part = self._root.resolve(member.schema, where)
        types = types_of(part, self._root.schema)
        if not types:
            if not self._is_any(part, where):
                self._root.refuse(where, "no type", "a value's type must be told here")
            return self._closed(ANY)
        if "string" not in types:
            return f"{self._root.leaf(part, where)} {self._parts.literal(self._tags.close)}"
        texts, leaves = self._ways(part, where, types)
        ways = [self._closed(f"({' | '.join(texts)})")] if texts else []
        for leaf in leaves:
            json_value = self._root.leaf(leaf, where)
            ways.append(f"{json_value} {self._parts.literal(self._tags.close)}")
        return f"({' | '.join(ways)})"

    def _is_any(self, part: Schema, where: str) -> bool:
        """Whether a schema says nothing, or nothing in one of its ways."""
        said = [name for name in part if name in ENFORCED]
        if said == ["anyOf"]:
            ways = [self._root.resolve(one, where) for one in part["anyOf"]]
            return any(not ENFORCED & one.keys() for one in ways)
        return not said

    def _closed(self, body: str) -> str:
        """A text and what closes it; the mark comes first there."""
        plain, special = self._parts.parted(self._tags.close)
        end = f" {lark.string(plain)}" if plain else ""
        text = self._parts.terminal(f"({body} & {self._unlike}){end}")
        return f"{text} {special}" if special else self._parts.rule(text, lazy=True)

    def _ways(self, part: Schema, where: str, types: frozenset[str]) -> tuple[list[str], list[Any]]:
        """A value that may be a string: its texts, and the schemas of what is written as JSON."""
        strings: list[str] = []
        texts: list[str] = []
        leaves: list[Schema] = []
        others = types - {"string"}
        for way in self._options(part, where):
            if "enum" in way or "const" in way:
                self._values(way, where, others, texts, leaves)
                continue
            for name in sorted(types_of(way, self._root.schema)):
                limited = any(keyword in way for keyword in _LIMITS)
                if name == "string":
                    if (text := raw_string(way)) is None:
                        self._root.refuse(where, f"the format {str(way['format'])[:80]!r}")
                    strings.append(text)
                elif name in ("object", "array") or (name in _STARTS and limited):
                    leaves.append({**_without(way, KEYWORDS), "type": name})
                elif name in READS:
                    texts.append(f"/{READS[name]}/")
        not_read = "".join(f" & ~/{READS[name]}/" for name in sorted(others) if name in READS)
        starts = {_STARTS[leaf["type"]] for leaf in leaves if leaf.get("type") in _STARTS}
        not_read += "".join(f" & ~{start}" for start in sorted(starts))
        return texts + [f"({text}{not_read})" for text in strings], leaves

    def _options(self, part: Schema, where: str) -> Iterator[Schema]:
        """The ways of `anyOf`, and of `oneOf` where at most one is a string."""
        part = self._root.resolve(part, where)
        said = {name for name in part if name in ENFORCED}
        combined = said & set(_COMBINE)
        if not combined:
            yield part
            return
        kind = min(combined)
        if said != {kind} or kind == "allOf":
            self._root.refuse(where, f"{kind!r} of what may be a string")
        ways = [self._root.resolve(one, where) for one in part[kind]]
        if kind == "oneOf" and not _disjoint(ways, self._root.schema):
            self._root.refuse(where, "'oneOf' of what may be a string")
        for one in ways:
            yield from self._options(one, where)

    def _values(
        self, way: Schema, where: str, others: frozenset[str], texts: list[str], leaves: list[Any]
    ) -> None:
        """The values of `enum` or `const`."""
        said = {name for name in way if name in ENFORCED} - {"type", "enum", "const"}
        if said or ("enum" in way and "const" in way):
            self._root.refuse(where, f"'enum' or 'const' beside {min(said, default='the other')}")
        types = types_of({"type": way["type"]}) if "type" in way else None
        for value in [way["const"]] if "const" in way else way["enum"]:
            name = type_name(value)
            if (
                types is not None
                and name not in types
                and not (name == "integer" and "number" in types)
            ):
                continue
            if name in ("object", "array"):
                leaves.append({"const": value})
                continue
            text = value if name == "string" else json.dumps(value)
            wrong = self._tags.mark in text or (name == "string" and reads_as_other(text, others))
            if wrong:
                self._root.refuse(where, f"the value {text[:80]!r}")
            texts.append(lark.string(text) if text else '""')
        if not texts and not leaves:
            self._root.refuse(where, "no value of its type")


def _only_object(root: Root, part: Schema) -> None:
    for keyword in ("anyOf", "oneOf", "allOf", "enum", "const", "$ref"):
        if keyword in part:
            root.refuse("#", repr(keyword))


def _disjoint(ways: list[Schema], root: Schema) -> bool:
    """Whether no value is of two of the ways, as far as their types tell."""
    seen: set[str] = set()
    for way in ways:
        types = set(types_of(way, root))
        types |= {"integer"} if "number" in types else set()
        if not types or types & seen:
            return False
        seen |= types
    return True


def _without(part: Schema, names: tuple[str, ...]) -> Schema:
    return {key: part[key] for key in part if key not in names}
