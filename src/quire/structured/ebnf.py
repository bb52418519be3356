"""Translates grammars written with `::=` to Lark: EBNF as XGrammar reads it, and llama.cpp's GBNF.

Both have rules of strings, sets of characters, `.`, groups, alternatives and repetitions (`* + ?`,
`{2}`, `{2,}`, `{2,5}`), comments after `#`, and begin at `root`. What only one of them has
(lookahead assertions, tokens by number) is refused.

Such a grammar is about characters, and Lark's terminals are not: a lexer takes the longest match.
So a grammar without recursion becomes one regular expression, and one with recursion is matched
character by character. That is exact; with a large vocabulary it may exceed the work that is
allowed for one token.

Reading takes time in proportion to the text. Knows no request and no llguidance.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, NoReturn

from quire.errors import InvalidRequest

MAX_DEPTH: Final = 100
"""Nested groups in a rule."""
MAX_REPEAT: Final = 100_000
MAX_REGEX: Final = 1_000_000
"""Characters of the regular expression that a grammar without recursion becomes: rules that are
used twice are written twice."""

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
_STAMP: Final = re.compile(r"(?m)^[^#\"\[\n]*::=")


def is_ebnf(text: str) -> bool:
    """Whether rules are written with `::=`, which Lark has not."""
    return _STAMP.search(text) is not None


# ---- what a grammar consists of --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CharSet:
    """One character of a set: a regular expression for it."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Literal:
    """A string, perhaps empty."""

    text: str


@dataclass(frozen=True, slots=True)
class RuleName:
    """Another rule."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Repetition:
    """A repetition; `most` is None without a limit."""

    body: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Parts:
    """One after another, or one of them."""

    parts: tuple[Node, ...]
    one_of: bool = False


Node = CharSet | Literal | RuleName | Repetition | Parts


def to_lark(text: str) -> str:
    """The grammar in Lark, with the rule `start`.

    Raises:
        InvalidRequest: it is malformed; the message has line and column.
    """
    rules = _Reader(text).read()
    used = _reachable(rules)
    recursive = _recursive(rules, used)
    if recursive is None:
        return f"start: /{_Regex(rules).whole()}/"
    return _Writer(rules, used).write()


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
            return CharSet(r"(?s:.)")
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
        return Repetition(body, least, most)

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
        parts: list[str] = []
        while self.peek() != "]":
            if self.peek() in ("", "\n"):
                self.at = start
                self.fail("this set of characters is not closed")
            if known := re.compile(r"\\[dws]").match(self.text, self.at):
                self.at += 2
                parts.append({"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\x0b\x0c"}[known[0][1]])
                continue
            first = self.character()
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                last = self.character()
                if last < first:
                    self.fail("this range of characters ends before it begins")
                parts.append(f"{_in_set(first)}-{_in_set(last)}")
            else:
                parts.append(_in_set(first))
        self.at += 1
        if not parts:
            if negated:
                return CharSet(r"(?s:.)")
            self.at = start
            self.fail("this set of characters is empty")
        return CharSet(f"[{'^' if negated else ''}{''.join(parts)}]")

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


def _in_set(char: str) -> str:
    """A character within brackets of a regular expression."""
    return char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):X}}}"


def _literal(text: str) -> str:
    """A text in a regular expression."""
    return "".join(_in_set(char) if char != " " else " " for char in text)


# ---- rules that use each other ---------------------------------------------------------------


def _names(node: Node) -> list[str]:
    found: list[str] = []
    todo = [node]
    while todo:
        match todo.pop():
            case RuleName(name=name):
                found.append(name)
            case Repetition(body=body):
                todo.append(body)
            case Parts(parts=parts):
                todo += reversed(parts)
    return found


def _reachable(rules: dict[str, Node]) -> dict[str, list[str]]:
    """The rules that `root` leads to, each with those that it uses."""
    found: dict[str, list[str]] = {}
    todo = ["root"]
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = _names(rules[name])
            todo += found[name]
    return found


def _recursive(rules: dict[str, Node], used: dict[str, list[str]]) -> set[str] | None:
    """The rules from which a recursive one is reached; None if there is none, and the grammar is a
    regular expression of bearable length."""
    left = {name: len(set(names)) for name, names in used.items()}
    users: dict[str, list[str]] = {name: [] for name in used}
    for name, names in used.items():
        for other in set(names):
            users[other].append(name)
    lengths: dict[str, int] = {}
    ready = [name for name, count in left.items() if not count]
    while ready:
        name = ready.pop()
        lengths[name] = min(_length(rules[name], lengths), 2 * MAX_REGEX)
        for user in users[name]:
            left[user] -= 1
            if not left[user]:
                ready.append(user)
    if len(lengths) == len(used) and lengths["root"] <= MAX_REGEX:
        return None
    return set(used) - set(lengths)


def _length(node: Node, lengths: dict[str, int]) -> int:
    match node:
        case CharSet(pattern=pattern):
            return len(pattern)
        case Literal(text=text):
            return 8 * len(text) + 2
        case RuleName(name=name):
            return lengths[name] + 4
        case Repetition(body=body):
            return _length(body, lengths) + 20
        case Parts(parts=parts):
            return sum(_length(part, lengths) + 1 for part in parts) + 4


@dataclass(slots=True)
class _Regex:
    """Writes rules without recursion as one regular expression."""

    rules: dict[str, Node]
    known: dict[str, str] = field(default_factory=dict)

    def whole(self) -> str:
        return self.rule("root")

    def rule(self, name: str) -> str:
        # In the order of use, without recursion of Python's: rules may form long chains.
        todo = [name]
        while todo:
            top = todo[-1]
            lacking = [n for n in _names(self.rules[top]) if n not in self.known]
            if lacking:
                todo += lacking
            else:
                self.known.setdefault(top, self.node(self.rules[top]))
                todo.pop()
        return self.known[name]

    def node(self, node: Node) -> str:
        match node:
            case CharSet(pattern=pattern):
                return pattern
            case Literal(text=text):
                return f"(?:{_literal(text)})"
            case RuleName(name=name):
                return self.known[name]
            case Repetition(body=body, least=least, most=most):
                return f"(?:{self.node(body)}){_times(least, most)}"
            case Parts(parts=parts, one_of=one_of):
                return f"(?:{('|' if one_of else '').join(map(self.node, parts))})"


def _times(least: int, most: int | None) -> str:
    usual = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return usual.get((least, most), f"{{{least},{'' if most is None else most}}}")


@dataclass(slots=True)
class _Writer:
    """Writes recursive rules, each terminal of them one character."""

    rules: dict[str, Node]
    used: dict[str, list[str]]
    lines: list[str] = field(default_factory=list)
    terminals: dict[str, str] = field(default_factory=dict)

    def write(self) -> str:
        numbers = {name: f"r{i}" for i, name in enumerate(self.used)}
        self.lines = [f"start: {numbers['root']}"]
        for name, number in numbers.items():
            self.lines.append(f"{number}: {self.node(self.rules[name], numbers)}")
        made = (f"{name}: /{pattern}/" for pattern, name in self.terminals.items())
        return "\n".join((*self.lines, *made))

    def node(self, node: Node, numbers: dict[str, str]) -> str:
        match node:
            case CharSet(pattern=pattern):
                return self.terminal(pattern)
            case Literal(text=text):
                return " ".join(self.terminal(_literal(char)) for char in text) or '""'
            case RuleName(name=name):
                return numbers[name]
            case Repetition(body=body, least=least, most=most):
                return f"({self.node(body, numbers)}){_times(least, most)}"
            case Parts(parts=parts, one_of=one_of):
                if not parts:
                    return '""'
                inner = [self.node(part, numbers) for part in parts]
                return f"({' | '.join(inner)})" if one_of else f"({' '.join(inner)})"

    def terminal(self, pattern: str) -> str:
        return self.terminals.setdefault(pattern, f"T{len(self.terminals)}")
