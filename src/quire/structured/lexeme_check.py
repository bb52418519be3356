"""Finds out whether a greedy lexer cuts every text of a grammar where the grammar cuts it.

The condition, for all units A and B that may begin at the same place:

    there is no text x of A, and no character c that may follow A,
    such that x c is the beginning of a text of B.

Then the lexer can end a unit when no unit goes on, which is the only end it knows. Units with a
text in common may both be meant by it; llguidance goes on with both, and what may begin after one
may then begin beside what begins after the other.

All that is approximated is on the safe side. What may follow a unit are all units that stand after
it anywhere in the grammar. Repetitions whose bounds differ or are large count as unbounded. All
characters beyond
ASCII count as one, because the lexer reads bytes, and two of them may begin with the same byte.

The automaton of a unit is Glushkov's: its states are the positions of characters in its expression
(V. M. Glushkov, The abstract theory of automata, 1961). Sets of positions, units and characters are
bits of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
)

MAX_POSITIONS: Final = 4_000
"""Of one unit, with its repetitions written out."""
MAX_WORK: Final = 500_000
"""Pairs of positions that are compared for one grammar: about a second."""
MAX_WRITTEN_OUT: Final = 32
"""Positions up to which the least of a repetition is written out."""
_BEYOND: Final = 1 << 128
"""Stands for every character beyond ASCII."""


class TooMuchWork(Exception):
    """The comparison takes longer than is allowed."""


@dataclass(slots=True)
class Work:
    """What is left of the work that one grammar may cause, and the automata that were made."""

    left: int = MAX_WORK
    automata: dict[Node, _Automaton] = field(default_factory=dict)

    def spend(self, amount: int) -> None:
        """Count work.

        Raises:
            TooMuchWork: nothing is left.
        """
        self.left -= amount
        if self.left < 0:
            raise TooMuchWork


def violations(shape: Rules, rules: Rules, units: list[Unit], work: Work) -> list[Unit]:
    """The units that go on where another ends.

    Args:
        shape: The grammar over units.
        rules: The grammar over characters, for the rules that units use.
        units: All units of `shape`, by number.
        work: What may be spent.

    Raises:
        TooMuchWork: comparing them takes too long.
    """
    automata = [_automaton_of(unit.body, rules, work) for unit in units]
    order = _Order(shape, len(units), work)
    after = [_union(automata[b].begins for b in _bits(follow)) for follow in order.after]
    # Places where units may begin: the start, and after each unit.
    places = {order.first, *order.after}
    merged = _Merged(order.after)
    wrong: set[int] = set()
    seen: set[tuple[int, int]] = set()
    while places:
        together = places.pop()
        for a in _bits(together):
            for b in _bits(together):
                if (a, b) in seen:
                    continue
                seen.add((a, b))
                work.spend(1)
                if not automata[a].begins & automata[b].begins:
                    continue
                tie, goes_on = _compare(automata[a], automata[b], after[a], work)
                if goes_on:
                    wrong.add(b)
                if tie and a != b and merged.join(a, b):
                    places.add(merged.after(a))
    return [unit for unit in units if unit.number in wrong]


class _Merged:
    """What may begin after units that have texts in common."""

    def __init__(self, after: list[int]) -> None:
        self._after = list(after)
        self._parent = list(range(len(after)))

    def after(self, unit: int) -> int:
        return self._after[self._root(unit)]

    def join(self, a: int, b: int) -> bool:
        """Whether this was new."""
        a, b = self._root(a), self._root(b)
        if a == b:
            return False
        self._parent[b] = a
        self._after[a] |= self._after[b]
        return True

    def _root(self, unit: int) -> int:
        while self._parent[unit] != unit:
            unit = self._parent[unit]
        return unit


def _compare(a: _Automaton, b: _Automaton, after: int, work: Work) -> tuple[bool, bool]:
    """Whether two units have a text in common, and whether the second can go on with a character
    that follows the first."""
    tie = goes_on = False
    todo = [(p, q) for p in _bits(a.first) for q in _bits(b.first)]
    seen = set(todo)
    work.spend(len(todo) + 1)
    while todo:
        p, q = todo.pop()
        if not a.chars[p] & b.chars[q]:
            continue
        if a.last >> p & 1:
            tie = tie or bool(b.last >> q & 1)
            goes_on = goes_on or bool(b.next_chars[q] & after)
        for next_p in _bits(a.follow[p]):
            for next_q in _bits(b.follow[q]):
                pair = (next_p, next_q)
                if pair not in seen:
                    seen.add(pair)
                    todo.append(pair)
        work.spend(1 + a.follow[p].bit_count() * b.follow[q].bit_count())
    return tie, goes_on


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _union(masks: Iterator[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


# ---- one unit: positions of characters -------------------------------------------------------


@dataclass(slots=True)
class _Ends:
    """Where the texts of a part begin and end; `nullable` if one of them is empty."""

    first: int
    last: int
    nullable: bool


@dataclass(slots=True)
class _Automaton:
    """The positions of one unit."""

    chars: list[int] = field(default_factory=list)
    follow: list[int] = field(default_factory=list)
    first: int = 0
    last: int = 0
    begins: int = 0
    """Characters with which a text begins."""
    next_chars: list[int] = field(default_factory=list)
    """Characters that may come after each position."""

    def position(self, chars: int) -> _Ends:
        if len(self.chars) >= MAX_POSITIONS:
            raise TooMuchWork
        self.chars.append(chars)
        self.follow.append(0)
        bit = 1 << len(self.chars) - 1
        return _Ends(bit, bit, False)

    def join(self, left: int, right: int) -> None:
        for p in _bits(left):
            self.follow[p] |= right

    def sequence(self, parts: Iterable[_Ends]) -> _Ends:
        return _in_a_row(parts, self.join)


def _in_a_row(parts: Iterable[_Ends], join: Callable[[int, int], None]) -> _Ends:
    """The ends of parts one after the other; `join` is told what follows what."""
    whole = _Ends(0, 0, True)
    for part in parts:
        join(whole.last, part.first)
        whole = _Ends(
            whole.first | part.first if whole.nullable else whole.first,
            whole.last | part.last if part.nullable else part.last,
            whole.nullable and part.nullable,
        )
    return whole


def _automaton_of(body: Node, rules: Rules, work: Work) -> _Automaton:
    found = work.automata.get(body)
    if found is None:
        found = work.automata[body] = _Automaton()
        ends = _walk(body, rules, found)
        found.first, found.last = ends.first, ends.last
        found.begins = _union(found.chars[p] for p in _bits(ends.first))
        found.next_chars = [
            _union(found.chars[p] for p in _bits(follow)) for follow in found.follow
        ]
        work.spend(sum(follow.bit_count() for follow in found.follow))
    return found


def _walk(node: Node, rules: Rules, made: _Automaton) -> _Ends:
    match node:
        case CharSet(ranges=ranges):
            return made.position(_union(_chars(first, last) for first, last in ranges))
        case Literal(text=text):
            return made.sequence(made.position(_chars(ord(c), ord(c))) for c in text)
        case RuleName(name=name):
            return _walk(rules[name], rules, made)
        case Repetition(body=body, least=least, most=most):
            return _repeat(body, least, most, rules, made)
        case Parts(parts=parts, one_of=False):
            return made.sequence(_walk(part, rules, made) for part in parts)
        case Parts(parts=parts):
            found = [_walk(part, rules, made) for part in parts]
            return _Ends(
                _union(one.first for one in found),
                _union(one.last for one in found),
                any(one.nullable for one in found),
            )
        case _:
            raise AssertionError("a unit holds no units")


def _repeat(body: Node, least: int, most: int | None, rules: Rules, made: _Automaton) -> _Ends:
    before = len(made.chars)
    once = _walk(body, rules, made)
    size = len(made.chars) - before
    if most is None or least * size > MAX_WRITTEN_OUT:
        made.join(once.last, once.first)
        return _Ends(once.first, once.last, once.nullable or not least)
    copies = [once, *(_walk(body, rules, made) for _ in range(1, least))]
    if most > least:
        rest = _walk(body, rules, made) if least else once
        made.join(rest.last, rest.first)
        rest.nullable = True
        copies += [rest] if least else []
    return made.sequence(iter(copies))


def _chars(first: int, last: int) -> int:
    """The characters of a range, as bits."""
    found = _BEYOND if last >= 128 else 0
    if first < 128:
        found |= (1 << min(last, 127) + 1) - (1 << first)
    return found


# ---- all units: which come after which -------------------------------------------------------


class _Order:
    """Which units may begin the output, and which may come after each, as sets of bits."""

    def __init__(self, shape: Rules, count: int, work: Work) -> None:
        self._shape = shape
        self._work = work
        self._ends = {name: _Ends(0, 0, False) for name in shape}
        self.after = [0] * count
        while True:
            known = {name: (e.first, e.last, e.nullable) for name, e in self._ends.items()}
            after = list(self.after)
            for name, node in shape.items():
                self._ends[name] = self._walk(node)
            now = {name: (e.first, e.last, e.nullable) for name, e in self._ends.items()}
            if now == known and after == self.after:
                break
        self.first = self._ends["root"].first

    def _walk(self, node: Node) -> _Ends:
        self._work.spend(1)
        match node:
            case Unit(number=number, optional=optional):
                return _Ends(1 << number, 1 << number, optional)
            case RuleName(name=name):
                return self._ends[name]
            case Repetition(body=body, least=least, most=most):
                once = self._walk(body)
                if most != 1:
                    self._join(once.last, once.first)
                return _Ends(once.first, once.last, once.nullable or not least)
            case Parts(parts=parts, one_of=True):
                found = [self._walk(part) for part in parts]
                return _Ends(
                    _union(one.first for one in found),
                    _union(one.last for one in found),
                    any(one.nullable for one in found),
                )
            case Parts(parts=parts):
                return _in_a_row([self._walk(part) for part in parts], self._join)
            case _:
                raise AssertionError("a shape is made of units")

    def _join(self, left: int, right: int) -> None:
        for unit in _bits(left):
            self.after[unit] |= right
