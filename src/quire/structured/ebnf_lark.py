"""Writes a grammar about characters in Lark.

Lark's terminals are not about characters: a lexer takes the longest match. So a grammar without
recursion becomes one regular expression. One with recursion becomes rules over the largest parts
that a lexer matches exactly (`lexemes`); where there are none, these are single characters.

Knows no syntax but Lark's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from quire.structured.grammar_nodes import (
    CharSet,
    Literal,
    Node,
    Parts,
    Repetition,
    RuleName,
    Rules,
    Unit,
    each_after_its_parts,
    names_in,
    reachable,
    without_plain_loops,
)
from quire.structured.lexemes import find_units

MAX_REGEX: Final = 1_000_000
"""Characters of the regular expression that a grammar without recursion becomes: rules that are
used twice are written twice."""
_SOMETHING: Final = "/(?s:.+)/"


def rules_to_lark(rules: Rules) -> str:
    """The grammar in Lark, with the rule `start`."""
    rules = without_plain_loops(rules)
    if _is_one_regex(rules):
        return f"start: /{_Regex(rules).rule('root')}/"
    return _Writer(rules, find_units(rules)).write()


def in_set(char: str) -> str:
    """A character within brackets of a regular expression."""
    return char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):X}}}"


def _is_one_regex(rules: Rules) -> bool:
    """Whether there is no recursion, and the regular expression has a bearable length."""
    lengths: dict[str, int] = {}

    def visit(name: str) -> None:
        lengths[name] = min(_length(rules[name], lengths), 2 * MAX_REGEX)

    used = reachable(rules)
    each_after_its_parts(used, visit)
    return len(lengths) == len(used) and lengths["root"] <= MAX_REGEX


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
        case _:
            raise AssertionError("rules are not yet cut")


@dataclass(slots=True)
class _Regex:
    """Writes rules without recursion as regular expressions."""

    rules: Rules
    known: dict[str, str] = field(default_factory=dict)

    def rule(self, name: str) -> str:
        # In the order of use, without recursion of Python's: rules may form long chains.
        todo = [name]
        while todo:
            top = todo[-1]
            lacking = [n for n in names_in(self.rules[top]) if n not in self.known]
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
                return f"(?:{''.join(c if c == ' ' else in_set(c) for c in text)})"
            case RuleName(name=name):
                return self.rule(name)
            case Repetition(body=body, least=least, most=most):
                return f"(?:{self.node(body)}){_times(least, most)}"
            case Parts(parts=parts, one_of=one_of):
                return f"(?:{('|' if one_of else '').join(map(self.node, parts))})"
            case _:
                raise AssertionError("rules are not yet cut")


def _times(least: int, most: int | None) -> str:
    usual = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return usual.get((least, most), f"{{{least},{'' if most is None else most}}}")


class _Writer:
    """Writes rules over units: each unit is a terminal.

    Args:
        rules: The grammar over characters, for the rules that units use.
        shape: The grammar over units.
    """

    def __init__(self, rules: Rules, shape: Rules) -> None:
        self._regex = _Regex(rules)
        self._shape = shape
        self._numbers = {name: f"r{i}" for i, name in enumerate(shape)}
        self._terminals: dict[int, str] = {}

    def write(self) -> str:
        """All of it."""
        lines = [f"start: {self._numbers['root']}"]
        lines += (
            f"{self._numbers[name]}: {self._node(node)}" for name, node in self._shape.items()
        )
        return "\n".join((*lines, *self._terminals.values()))

    def _node(self, node: Node) -> str:
        match node:
            case Unit(number=number, body=body, optional=optional):
                pattern = f"T{number}: /{self._regex.node(body)}/"
                self._terminals[number] = f"{pattern} & {_SOMETHING}" if optional else pattern
                return f"T{number}?" if optional else f"T{number}"
            case RuleName(name=name):
                return self._numbers[name]
            case Repetition(body=body, least=least, most=most):
                return f"({self._node(body)}){_times(least, most)}"
            case Parts(parts=parts, one_of=one_of):
                if not parts:
                    return '""'
                return f"({(' | ' if one_of else ' ').join(map(self._node, parts))})"
            case _:
                raise AssertionError("rules were cut into units")
