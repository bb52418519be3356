"""Finds the largest parts of a grammar about characters that a lexer may match as units.

llguidance reads text with a lexer and parses the units that it finds, its lexemes. Its cost for one
token grows with the number of units, so a grammar whose units are single characters exceeds the
limits with a large vocabulary. But its lexer is greedy and never goes back: a unit ends where no
unit that is allowed there can go on. So a part of a grammar may be a unit only if that end is
always the right one, which `lexeme_check` finds out.

`find_units` begins with the largest regular parts and takes apart those that are wrong, until none
is left. Single characters are never wrong, so this ends. Knows neither syntax nor Lark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
)
from quire.structured.lexeme_check import TooMuchWork, Work, violations

MAX_SIZE: Final = 2_000
"""Characters, sets and repetitions of a rule that may be part of a unit, with its rules written
out."""
MAX_LEVELS: Final = 200
"""Nested groups of such a rule."""
MAX_NODES: Final = 20_000
"""Parts of a grammar beyond which each of its characters is a unit."""


def find_units(rules: Rules) -> Rules:
    """A grammar over the largest units that a greedy lexer matches exactly."""
    work = Work()
    cutter = _Cutter(rules, work)
    if sum(map(_count, rules.values())) <= MAX_NODES:
        try:
            while True:
                found = cutter.cut()
                wrong = violations(found, rules, list(cutter.units.values()), work)
                if not wrong:
                    return found
                cutter.broken.update(unit.body for unit in wrong)
        except TooMuchWork:
            pass
    cutter.by_character = True
    return cutter.cut()


class _Cutter:
    """Writes each rule over units, and takes apart those that are known to be wrong."""

    def __init__(self, rules: Rules, work: Work) -> None:
        self.rules = rules
        self.work = work
        self.by_character = False
        self.broken: set[Node] = set()
        self.units: dict[Node, Unit] = {}
        self._measures = _measures(rules)

    def cut(self) -> Rules:
        """The rules that `root` leads to, over units."""
        self.units = {}
        made: Rules = {}
        todo = ["root"]
        while todo:
            name = todo.pop()
            if name not in made:
                made[name] = self._shape(self.rules[name])
                todo += names_in(made[name])
        return made

    def _shape(self, node: Node) -> Node:
        if self._may_be_unit(node):
            return self._unit(node)
        match node:
            case Literal(text=text):
                return Parts(tuple(self._unit(Literal(char)) for char in text))
            case Repetition(body=body, least=least, most=most):
                return Repetition(self._shape(body), least, most)
            case Parts(parts=parts, one_of=True):
                return Parts(tuple(map(self._shape, parts)), one_of=True)
            case Parts(parts=parts):
                return Parts(tuple(self._sequence(parts)))
            case _:
                return node

    def _sequence(self, parts: tuple[Node, ...]) -> Iterator[Node]:
        """Neighbours that are regular become one unit, as many as possible."""
        at = 0
        while at < len(parts):
            end = at if self.by_character else self._end_of_run(parts, at)
            # What is wrong with a run is mostly how it ends.
            while end > at + 1:
                self.work.spend(end - at)
                if Parts(parts[at:end]) not in self.broken:
                    break
                end -= 1
            if end > at + 1:
                yield self._unit(Parts(parts[at:end]))
            else:
                yield self._shape(parts[at])
            at = max(end, at + 1)

    def _end_of_run(self, parts: tuple[Node, ...], at: int) -> int:
        size = levels = 0
        while at < len(parts):
            found = _measure(parts[at], self._measures)
            if found is None:
                break
            size, levels = size + found.size, max(levels, found.levels)
            if size >= MAX_SIZE or levels >= MAX_LEVELS:
                break
            at += 1
        return at

    def _may_be_unit(self, node: Node) -> bool:
        if isinstance(node, CharSet) or (isinstance(node, Literal) and len(node.text) <= 1):
            return True
        return not self.by_character and node not in self.broken and self._is_regular(node)

    def _is_regular(self, node: Node) -> bool:
        found = _measure(node, self._measures)
        return found is not None and found.size <= MAX_SIZE and found.levels <= MAX_LEVELS

    def _unit(self, node: Node) -> Node:
        found = self.units.get(node)
        if found is None:
            measure = _measure(node, self._measures)
            assert measure is not None, "units are regular"
            if not measure.matches_something:
                return Parts(())
            found = self.units[node] = Unit(len(self.units), node, measure.optional)
        return found


# ---- what is regular -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Measure:
    """Of a node that uses no recursive rule, with its rules written out."""

    size: int
    levels: int
    optional: bool
    matches_something: bool
    """Anything but nothing."""


def _measures(rules: Rules) -> dict[str, _Measure]:
    """Of each rule that is not recursive and leads to none that is."""
    found: dict[str, _Measure] = {}

    def visit(name: str) -> None:
        measure = _measure(rules[name], found)
        assert measure is not None, "its parts come first"
        found[name] = measure

    each_after_its_parts(reachable(rules), visit)
    return found


def _measure(node: Node, known: dict[str, _Measure]) -> _Measure | None:
    match node:
        case CharSet():
            return _Measure(1, 1, False, True)
        case Literal(text=text):
            return _Measure(len(text) + 1, 1, not text, bool(text))
        case RuleName(name=name):
            rule = known.get(name)
            return rule and _around([rule], rule.optional)
        case Repetition(body=body, least=least):
            inner = _measure(body, known)
            if inner is None:
                return None
            return _around([inner], not least or inner.optional)
        case Parts(parts=parts, one_of=one_of):
            given = [_measure(part, known) for part in parts]
            found = [measure for measure in given if measure is not None]
            if len(found) < len(given):
                return None
            optional = (measure.optional for measure in found)
            return _around(found, any(optional) if one_of else all(optional))
        case _:
            raise AssertionError("rules are not yet cut")


def _around(inner: list[_Measure], optional: bool) -> _Measure:
    size = sum(measure.size for measure in inner) + 1
    levels = max((measure.levels for measure in inner), default=0) + 1
    return _Measure(
        min(size, 2 * MAX_SIZE), levels, optional, any(m.matches_something for m in inner)
    )


def _count(node: Node) -> int:
    match node:
        case Literal(text=text):
            return len(text) + 1
        case Repetition(body=body):
            return 1 + _count(body)
        case Parts(parts=parts):
            return 1 + sum(map(_count, parts))
        case _:
            return 1
