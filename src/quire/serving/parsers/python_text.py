"""Reads Python literals that come in pieces, and writes them as JSON. Nothing is evaluated.

Strings with their escapes, numbers, `True`, `False`, `None`, lists, tuples (as arrays),
dictionaries (keys become strings). What is none of these becomes a string. Numbers that JSON has
stay as they are written. Knows nothing of calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from quire.serving.parsers.json_text import encoded

_WORD_END: Final = re.compile(r"""[\s,:=()\[\]{}'"]""")
_STRING_STOP: Final = re.compile(r"""['"\\]""")
_SPACE: Final = re.compile(r"\s*")
_SPACE_COMMAS: Final = re.compile(r"[\s,]*")
_JSON_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBER: Final = re.compile(
    r"([-+]?)([0-9]+(?:_[0-9]+)*)?(?:\.([0-9]+(?:_[0-9]+)*)?)?(?:[eE]([-+]?[0-9]+))?"
)
_HEX: Final = re.compile(r"[-+]?0[xX][0-9a-fA-F]{1,16}")
_WORDS: Final = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false",
    "null": "null",
}  # fmt: skip
_PREFIXES: Final = frozenset(("r", "b", "u", "f", "R", "B", "U", "F", "rb", "br", "fr", "rf"))
_ESCAPES: Final = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\\": "\\",
    "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_OCTAL: Final = frozenset("01234567")
_OPEN: Final = {"[": "]", "(": "]", "{": "}"}


class PythonString:
    """One string, from its opening quote on; written without the quotes, as JSON has it."""

    def __init__(self, out: Callable[[str], None], raw: bool = False) -> None:
        self.done = False
        self._out = out
        self._raw = raw
        self._quote = ""
        """One or three characters; while it is empty or doubtful, `_opening` counts them."""
        self._opening = ""
        self._closing = 0
        self._escape = ""

    def take(self, text: str, at: int) -> int:
        """Read on from `at`; returns where the string ends."""
        while at < len(text) and not self.done:
            if not self._quote:
                at = self._open(text, at)
            elif self._escape:
                at = self._escaped(text, at)
            else:
                at = self._plain(text, at)
        return at

    def end(self) -> None:
        """No more text comes."""
        if self._closing:
            self._out(encoded(self._quote[0] * self._closing))
            self._closing = 0
        elif len(self._opening) == 2 and not self._quote:
            self.done = True  # the empty string

    def _open(self, text: str, at: int) -> int:
        here = text[at]
        if self._opening and here != self._opening[0]:
            if len(self._opening) == 2:  # two quotes: the empty string
                self.done = True
                return at
            self._quote = self._opening
            return at
        self._opening += here
        if len(self._opening) == 3:
            self._quote = self._opening
        return at + 1

    def _plain(self, text: str, at: int) -> int:
        if self._closing and text[at] != self._quote[0]:
            self._out(encoded(self._quote[0] * self._closing))
            self._closing = 0
        found = _STRING_STOP.search(text, at)
        end = found.start() if found else len(text)
        if end > at:
            self._out(encoded(text[at:end]))
        if found is None:
            return end
        mark = found.group()
        if mark == self._quote[0]:
            self._closing += 1
            if self._closing == len(self._quote):
                self._closing = 0
                self.done = True
        elif mark == "\\" and not self._raw:
            self._escape = mark
        else:
            self._out(encoded(mark))
        return end + 1

    def _escaped(self, text: str, at: int) -> int:
        here, kind = text[at], self._escape[1:2]
        if not kind and (here in _HEX_DIGITS or here in _OCTAL):
            self._escape += here
            return at + 1
        if not kind:
            self._escape = ""
            self._out(encoded(_ESCAPES.get(here, "\\" + here)))
            return at + 1
        if kind in _OCTAL:
            if here in _OCTAL and len(self._escape) < 4:
                self._escape += here
                return at + 1
            self._code(int(self._escape[1:], 8))
            return at
        if here not in "0123456789abcdefABCDEF":
            self._out(encoded(self._escape))
            self._escape = ""
            return at
        self._escape += here
        if len(self._escape) == 2 + _HEX_DIGITS[kind]:
            self._code(int(self._escape[2:], 16))
        return at + 1

    def _code(self, code: int) -> None:
        self._escape = ""
        if 0xD800 <= code < 0xE000:
            self._out(f"\\u{code:04x}")  # half a character, whose other half may follow
        else:
            self._out(encoded(chr(code) if code < 0x110000 else "\ufffd"))


class PythonValue:
    """One value. The first character must be that of the value.

    Args:
        out: Told the pieces of its JSON.
    """

    def __init__(self, out: Callable[[str], None]) -> None:
        self.done = False
        self._out = out
        self._stack: list[str] = []
        """What closes the open containers, in JSON."""
        self._string: PythonString | None = None
        self._word: list[str] = []
        self._expects = "value"
        """`value`, `key`, `colon` (after a key) or `comma` (after a value)."""
        self._first = True
        """Nothing is in the innermost container yet."""
        self._ignored = 0
        """Depth of brackets that belong to no value."""

    def take(self, text: str, at: int) -> int:
        """Read on from `at`; returns where what belongs to the value ends."""
        while at < len(text) and not self.done:
            if self._string is not None:
                at = self._string.take(text, at)
                if self._string.done:
                    self._end_string()
            elif self._word:
                at = self._read_word(text, at)
            else:
                at = self._between(text, at)
        return at

    def end(self) -> None:
        """No more text comes: finish a word or string that its end completes."""
        if self._string is not None:
            self._string.end()
            if self._string.done:
                self._end_string()
        elif self._word:
            self._end_word()

    def _between(self, text: str, at: int) -> int:
        found = (_SPACE_COMMAS if self._expects in ("value", "key") else _SPACE).match(text, at)
        assert found is not None
        if self._stack:
            at = found.end()
        if at == len(text):
            return at
        here = text[at]
        if self._ignored or self._expects == "comma":
            return self._after_value(here, at)
        if self._expects == "colon":
            if here == ":":
                self._out(": ")
                self._expects = "value"
                return at + 1
            self._out(": null")
            self._expects = "comma"
            return at
        if here in ")]}":
            return self._close(at)
        if here in ":=":
            return at + 1
        self._separate()
        if here in "'\"":
            self._begin_string()
        elif here in _OPEN and self._expects == "value":
            self._out(here if here != "(" else "[")
            self._stack.append(_OPEN[here])
            self._expects, self._first = ("key" if here == "{" else "value"), True
            return at + 1
        elif here in _OPEN:  # a key that JSON cannot have
            self._out('""')
            self._expects, self._ignored = "colon", 0
            return at + 1
        else:
            self._word.append(here)
            return at + 1
        return at

    def _after_value(self, here: str, at: int) -> int:
        """Whatever is no comma and no end there is left out."""
        if here in "([{":
            self._ignored += 1
        elif here in ")]}" and self._ignored:
            self._ignored -= 1
        elif here in ")]}":
            return self._close(at)
        elif here == "," and not self._ignored:
            self._expects = "key" if self._stack[-1] == "}" else "value"
        return at + 1

    def _close(self, at: int) -> int:
        if self._expects == "value" and self._stack[-1] == "}":
            self._out("null")  # a key without its value
        self._out(self._stack.pop())
        self._expects = "value"
        self._ended()
        return at + 1

    def _separate(self) -> None:
        if self._stack and (self._expects == "key" or self._stack[-1] == "]"):
            if not self._first:
                self._out(", ")
            self._first = False

    def _begin_string(self, raw: bool = False) -> None:
        self._out('"')
        self._string = PythonString(self._out, raw)

    def _end_string(self) -> None:
        self._string = None
        self._out('"')
        self._ended()

    def _ended(self) -> None:
        """A value or a key is complete."""
        self._first = False
        if self._expects == "key":
            self._expects = "colon"
        else:
            self._expects = "comma"
            self.done = not self._stack

    def _read_word(self, text: str, at: int) -> int:
        found = _WORD_END.search(text, at)
        end = found.start() if found else len(text)
        self._word.append(text[at:end])
        if found is None:
            return end
        if found.group() in "'\"" and (prefix := "".join(self._word)) in _PREFIXES:
            self._word = []
            self._begin_string("r" in prefix.lower())
        else:
            self._end_word()
        return end

    def _end_word(self) -> None:
        word, self._word = "".join(self._word), []
        self._out(f'"{encoded(word)}"' if self._expects == "key" else word_to_json(word))
        self._ended()


def word_to_json(word: str) -> str:
    """The JSON of a number or name."""
    if word in _WORDS:
        return _WORDS[word]
    if _JSON_NUMBER.fullmatch(word):
        return word
    if _HEX.fullmatch(word):
        return str(int(word, 16))
    found = _NUMBER.fullmatch(word)
    if found is None or (found[2] is None and found[3] is None):
        return f'"{encoded(word)}"'
    sign, whole, part, power = found.groups()
    number = (whole or "").replace("_", "").lstrip("0") or "0"
    if "." in word:
        number += "." + ((part or "").replace("_", "") or "0")
    return ("-" if sign == "-" else "") + number + (f"e{power}" if power else "")


def python_to_json(text: str) -> str | None:
    """The JSON of a whole literal; `None` if it does not end where the text does."""
    parts: list[str] = []
    value = PythonValue(parts.append)
    end = value.take(text, 0)
    value.end()
    return "".join(parts) if value.done and end == len(text) else None
