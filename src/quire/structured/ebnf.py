"""Translates grammars written with `::=` to Lark: EBNF as XGrammar reads it, and llama.cpp's GBNF.

Both have rules of strings, sets of characters, `.`, groups, alternatives and repetitions (`* + ?`,
`{2}`, `{2,}`, `{2,5}`), comments after `#`, and begin at `root`. What only one of them has
(lookahead assertions, tokens by number) is refused.

Reading takes time in proportion to the text; `ebnf_lark` writes what was read. Knows no request and
no llguidance.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, NoReturn

from quire.errors import InvalidRequest
from quire.structured.ebnf_lark import in_set, rules_to_lark
from quire.structured.grammar_nodes import (
    ANY_CHARACTER,
    CharSet,
    Literal,
    Node,
    Parts,
    Repetition,
    RuleName,
)

MAX_DEPTH: Final = 100
"""Nested groups in a rule."""
MAX_REPEAT: Final = 100_000

_RULE: Final = re.compile(r"([A-Za-z_][\w-]*)[ \t\r\n]*::=")
_NAME: Final = re.compile(r"[A-Za-z_][\w-]*")
_REPEAT: Final = re.compile(r"\{[ \t]*(\d+)[ \t]*(,[ \t]*(\d*)[ \t]*)?\}")
_SIMPLE: Final = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "0": "\0",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
}
_HEX: Final = {"x": 2, "u": 4, "U": 8}
_CLASSES: Final = {
    "d": [(48, 57)],
    "w": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "s": [(9, 13), (32, 32)],
}
"""Ranges of the short names of sets."""
_STAMP: Final = re.compile(r"(?m)^[^#\"\[\n]*::=")


def is_ebnf(text: str) -> bool:
    """Whether rules are written with `::=`, which Lark has not."""
    return _STAMP.search(text) is not None


def to_lark(text: str) -> str:
    """The grammar in Lark, with the rule `start`.

    Raises:
        InvalidRequest: it is malformed; the message has line and column.
    """
    return rules_to_lark(_Reader(text).read())


# ---- reading ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Reader:
    """Reads one text."""

    text: str
    at: int = 0
    depth: int = 0
    rules: dict[str, Node] = field(default_factory=dict)

    def read(self) -> dict[str, Node]:
        """All rules by name."""
        names: list[RuleName] = []
        self.skip()
        while self.at < len(self.text):
            head = _RULE.match(self.text, self.at)
            if head is None:
                self.fail("expected a rule, as in: name ::= ...")
            if head[1] in self.rules:
                self.fail(f"the rule {head[1]} is defined twice")
            self.at = head.end()
            self.skip()
            self.rules[head[1]] = self.alternatives(names)
        if "root" not in self.rules:
            self.fail("there is no rule root")
        for name in names:
            if name.name not in self.rules:
                self.at = name.at
                self.fail(f"the rule {name.name} is not defined")
        return self.rules

    def alternatives(self, names: list[RuleName]) -> Node:
        found = [self.sequence(names)]
        while self.peek() == "|":
            self.at += 1
            self.skip()
            found.append(self.sequence(names))
        return found[0] if len(found) == 1 else Parts(tuple(found), one_of=True)

    def sequence(self, names: list[RuleName]) -> Node:
        parts: list[Node] = []
        while (char := self.peek()) not in ("", "|", ")") and not _RULE.match(self.text, self.at):
            part = self.element(char, names)
            parts.append(self.repeated(part))
        return parts[0] if len(parts) == 1 else Parts(tuple(parts))

    def element(self, char: str, names: list[RuleName]) -> Node:
        if char == '"' or char == "'":
            return self.string(char)
        if char == "[":
            return self.char_set()
        if char == "(":
            return self.group(names)
        if char == ".":
            self.at += 1
            return ANY_CHARACTER
        if name := _NAME.match(self.text, self.at):
            made = RuleName(name[0], self.at)
            names.append(made)
            self.at = name.end()
            return made
        if char in "<!":
            self.fail("tokens by name or number are not supported; write their text")
        if char == "/":
            self.fail("regular expressions are not part of EBNF; use Lark, or a set of characters")
        self.fail(f"unexpected {char!r}")

    def group(self, names: list[RuleName]) -> Node:
        start = self.at
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"groups are nested more than {MAX_DEPTH} deep")
        self.at += 1
        self.skip()
        if self.peek() == "=":
            self.fail("lookahead assertions are not supported")
        found = self.alternatives(names)
        if self.peek() != ")":
            self.at = start
            self.fail("this group is not closed")
        self.at += 1
        self.depth -= 1
        return found

    def repeated(self, body: Node) -> Node:
        self.skip()
        while (char := self.peek()) and char in "*+?{":
            if char == "{":
                body = self.counted(body)
            else:
                self.at += 1
                body = Repetition(body, int(char == "+"), 1 if char == "?" else None)
            self.skip()
        return body

    def counted(self, body: Node) -> Node:
        found = _REPEAT.match(self.text, self.at)
        if found is None:
            self.fail("expected a repetition: {2}, {2,} or {2,5}")
        least = _number(found[1])
        most = least if found[2] is None else _number(found[3]) if found[3] else None
        if max(least, most or 0) > MAX_REPEAT:
            self.fail(f"repetitions must be at most {MAX_REPEAT}")
        if most is not None and most < least:
            self.fail(f"the repetition ends at {most}, before it begins at {least}")
        self.at = found.end()
        return Parts(()) if most == 0 else Repetition(body, least, most)

    def string(self, quote: str) -> Node:
        start = self.at
        self.at += 1
        out: list[str] = []
        while (char := self.peek()) != quote:
            if char in ("", "\n"):
                self.at = start
                self.fail("this string is not closed")
            out.append(self.character())
        self.at += 1
        return Literal("".join(out))

    def char_set(self) -> Node:
        start = self.at
        self.at += 1
        negated = self.peek() == "^"
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while self.peek() != "]":
            if self.peek() in ("", "\n"):
                self.at = start
                self.fail("this set of characters is not closed")
            if known := re.compile(r"\\[dws]").match(self.text, self.at):
                self.at += 2
                ranges += _CLASSES[known[0][1]]
                continue
            first = self.character()
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                last = self.character()
                if last < first:
                    self.fail("this range of characters ends before it begins")
                ranges.append((ord(first), ord(last)))
            else:
                ranges.append((ord(first), ord(first)))
        self.at += 1
        if negated and not ranges:
            return ANY_CHARACTER
        wanted = _others(ranges) if negated else ranges
        if not wanted:
            self.at = start
            self.fail("this set of characters is empty")
        return CharSet(_set_pattern(negated, ranges), tuple(wanted))

    def character(self) -> str:
        """One character of a string or a set, perhaps escaped."""
        char = self.peek()
        if char == "":
            self.fail("the grammar ends within a string or a set of characters")
        self.at += 1
        if char != "\\":
            return char
        code = self.peek()
        self.at += 1
        if digits := _HEX.get(code):
            number = self.text[self.at : self.at + digits]
            if not re.fullmatch(f"[0-9A-Fa-f]{{{digits}}}", number):
                self.fail(f"expected {digits} hexadecimal digits after \\{code}")
            value = int(number, 16)
            if value > 0x10FFFF or 0xD800 <= value < 0xE000:
                self.fail(f"\\{code}{number} is no character")
            self.at += digits
            return chr(value)
        if code in _SIMPLE:
            return _SIMPLE[code]
        if code == "" or code.isalnum():
            self.at -= 1
            self.fail(f"unknown escape \\{code}")
        return code

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def skip(self) -> None:
        """Go past whitespace and comments."""
        while (char := self.peek()) and char in " \t\r\n#":
            if char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                self.at += 1

    def fail(self, what: str) -> NoReturn:
        at = min(self.at, len(self.text))
        line, column = self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at)
        raise InvalidRequest(
            f"structured_outputs.grammar: line {line}, column {column}: {what}.",
            param="structured_outputs.grammar",
        )


def _number(digits: str) -> int:
    return int(digits[:10])


def _set_pattern(negated: bool, ranges: list[tuple[int, int]]) -> str:
    """A set of characters as a regular expression."""
    inner = (
        in_set(chr(first)) if first == last else f"{in_set(chr(first))}-{in_set(chr(last))}"
        for first, last in ranges
    )
    return f"[{'^' if negated else ''}{''.join(inner)}]"


def _others(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """All characters that are in none of the ranges."""
    found, begin = [], 0
    for first, last in sorted(ranges):
        if first > begin:
            found.append((begin, first - 1))
        begin = max(begin, last + 1)
    return [*found, (begin, 0x10FFFF)] if begin <= 0x10FFFF else found
