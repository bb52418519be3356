"""Reads JSON that comes in pieces: where a value ends, and the entries of an object.

Nothing is checked beyond what is needed to find the ends: values are passed on as they were
written. Knows nothing of calls.
"""

from __future__ import annotations

import json
import re
from typing import Final, Protocol

MAX_KEY: Final = 512
"""Longest key of an object that is read, in characters of its JSON."""
_BRACKETS: Final = re.compile(r'["\[\]{}]')
_STRING_END: Final = re.compile(r'["\\]')
_SCALAR_END: Final = re.compile(r'[\s,:"\[\]{}<]')
_SPACE: Final = re.compile(r"\s*")
_SPACE_COMMAS: Final = re.compile(r"[\s,]*")
_LONE_SURROGATES: Final = re.compile("[\ud800-\udfff]")


class JsonValue:
    """Finds the end of one value. The first character must be that of the value."""

    def __init__(self) -> None:
        self.done = False
        self.first = ""
        """The value's first character."""
        self._depth = 0
        self._in_string = self._escaped = False

    def take(self, text: str, at: int) -> int:
        """Read on from `at`; returns where what belongs to the value ends."""
        if not self.first and at < len(text):
            self.first = text[at]
        while not self.done and at < len(text):
            if self._in_string:
                at = self._string(text, at)
            elif self.first in '"[{':
                at = self._brackets(text, at)
            else:
                found = _SCALAR_END.search(text, at)
                at = found.start() if found else len(text)
                self.done = found is not None
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _STRING_END.search(text, at)
        if found is None:
            return len(text)
        if found.group() == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = self._depth == 0
        return found.end()

    def _brackets(self, text: str, at: int) -> int:
        found = _BRACKETS.search(text, at)
        if found is None:
            return len(text)
        mark = found.group()
        if mark == '"':
            self._in_string = True
        else:
            self._depth += 1 if mark in "[{" else -1
            self.done = self._depth <= 0
        return found.end()


class EntryTaker(Protocol):
    """What an `ObjectReader` tells."""

    def key(self, key: str) -> None:
        """The key of the next entry."""
        ...

    def value(self, text: str) -> None:
        """A piece of its value as written."""
        ...

    def value_end(self) -> None:
        """The value is complete."""
        ...


class ObjectReader:
    """Reads one object and tells its entries. The first character must be `{`."""

    def __init__(self, taker: EntryTaker) -> None:
        self.done = False
        self.failed = False
        """The text is no object: reading stopped there."""
        self._taker = taker
        self._value: JsonValue | None = None
        self._key: list[str] = []
        self._key_length = 0
        self._key_reader: JsonValue | None = None
        self._where = "{"
        """What is expected next: `{`, a key (`k`), `:` or a value (`v`)."""

    def take(self, text: str, at: int) -> int:
        """Read on from `at`; returns where reading stopped: at the end of the object, of the text,
        or at what is wrong."""
        while at < len(text) and not (self.done or self.failed):
            if self._value is not None:
                at = self._read_value(text, at)
            elif self._key_reader is not None:
                at = self._read_key(text, at)
            else:
                at = self._between(text, at)
        return at

    def _between(self, text: str, at: int) -> int:
        pattern = _SPACE_COMMAS if self._where == "k" else _SPACE
        found = pattern.match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at
        here = text[at]
        if self._where == "v":
            if here in ",}]:":
                self.failed = True
                return at
            self._value = JsonValue()
            return at
        if self._where == "k" and here == '"':
            self._key_reader, self._key, self._key_length = JsonValue(), [], 0
            return at
        if self._where == "k" and here == "}":
            self.done = True
            return at + 1
        if here != self._where:
            self.failed = True
            return at
        self._where = "k" if here == "{" else "v"
        return at + 1

    def _read_key(self, text: str, at: int) -> int:
        assert self._key_reader is not None
        room = MAX_KEY - self._key_length
        piece = text[at : at + room]
        piece = piece[: self._key_reader.take(piece, 0)]
        self._key.append(piece)
        self._key_length += len(piece)
        if self._key_reader.done:
            key = decoded("".join(self._key))
            self._key_reader, self._where = None, ":"
            self._taker.key(key)
        elif self._key_length == MAX_KEY:
            self.failed = True
        return at + len(piece)

    def _read_value(self, text: str, at: int) -> int:
        assert self._value is not None
        end = self._value.take(text, at)
        if end > at:
            self._taker.value(text[at:end])
        if self._value.done:
            self._value, self._where = None, "k"
            self._taker.value_end()
        return end


def decoded(literal: str) -> str:
    """The text of a JSON string, or as much of it as can be read if it ends early or is wrong."""
    try:
        text = json.loads(literal, strict=False)
    except ValueError:
        return _LONE_SURROGATES.sub("\ufffd", _rescued(literal))
    return _LONE_SURROGATES.sub("\ufffd", text) if isinstance(text, str) else literal


_ESCAPE: Final = re.compile(r'\\(?:u([0-9a-fA-F]{4})|(["\\/bfnrt]))?')
_LETTERS: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def _rescued(literal: str) -> str:
    """A string whose escapes are wrong, or that ends within one: those are left as written."""
    body = literal.removeprefix('"')
    if len(literal) > 1 and literal.endswith('"'):
        body = body[:-1]

    def one(found: re.Match[str]) -> str:
        if found[1]:
            return chr(int(found[1], 16))
        return _LETTERS.get(found[2], found[2]) if found[2] else found[0]

    return _ESCAPE.sub(one, body)


def encoded(text: str) -> str:
    """Characters as they stand within a JSON string, without quotes. Each is written on its own, so
    pieces can be joined."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
