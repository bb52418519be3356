"""What a grammar about characters consists of, and what can be said of its rules without a syntax.

A grammar is a table of rules by name that begins at `root`. Walks over rules keep their own stacks
where rules lead to rules, because such chains may be longer than Python's stack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class CharSet:
    """One character of a set."""

    pattern: str
    """A regular expression for it."""
    ranges: tuple[tuple[int, int], ...]
    """First and last code point of each range in it."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A string, perhaps empty."""

    text: str


@dataclass(frozen=True, slots=True)
class RuleName:
    """Another rule."""

    name: str
    at: int = field(compare=False)
    """Where it stands in the text."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """A repetition; `most` is None without a limit, and never 0."""

    body: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Parts:
    """One after another, or one of them."""

    parts: tuple[Node, ...]
    one_of: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """A part that a lexer matches as a whole; see `lexemes`."""

    number: int
    body: Node
    optional: bool
    """The part matches nothing, too; the lexer's unit does not."""


Node = CharSet | Literal | RuleName | Repetition | Parts | Unit
Rules = dict[str, Node]
ANY_CHARACTER: Final = CharSet(r"(?s:.)", ((0, 0x10FFFF),))


def names_in(node: Node) -> list[str]:
    """The rules that a node uses, in order."""
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


def reachable(rules: Rules) -> dict[str, list[str]]:
    """The rules that `root` leads to, each with those that it uses."""
    found: dict[str, list[str]] = {}
    todo = ["root"]
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = names_in(rules[name])
            todo += found[name]
    return found


def each_after_its_parts(used: dict[str, list[str]], visit: Callable[[str], None]) -> None:
    """Visit the rules that neither are recursive nor lead to one that is, each after all that it
    uses."""
    left = {name: len(set(names)) for name, names in used.items()}
    users: dict[str, list[str]] = {name: [] for name in used}
    for name, names in used.items():
        for other in set(names):
            users[other].append(name)
    ready = [name for name, count in left.items() if not count]
    while ready:
        name = ready.pop()
        visit(name)
        for user in users[name]:
            left[user] -= 1
            if not left[user]:
                ready.append(user)


def without_plain_loops(rules: Rules) -> Rules:
    """Rules that call only themselves, and only at their very end or beginning, as repetitions:
    `ws ::= ([ \\t] ws)?` becomes `ws ::= [ \\t]*`."""
    return {name: _as_loop(name, node) for name, node in rules.items()}


def _as_loop(name: str, node: Node) -> Node:
    if name not in names_in(node):
        return node
    for last in (True, False):
        again, done = _split(name, node, last) or (None, None)
        if again is not None and done is not None:
            loop = Repetition(again, 0, None)
            return Parts((loop, done) if last else (done, loop))
    return node


def _split(name: str, node: Node, last: bool) -> tuple[Node | None, Node | None] | None:
    """A rule as what stands beside its call of itself, and what there is without a call: all its
    texts are `again name | done`, or `name again | done` if the call comes first. Either may be
    missing. None if the rule has no such form."""
    match node:
        case RuleName(name=other) if other == name:
            return Parts(()), None
        case Repetition(body=body, least=0, most=1):
            split = _split(name, body, last)
            return split and (split[0], _either([split[1], Parts(())]))
        case Parts(parts=parts, one_of=True):
            splits = [_split(name, part, last) for part in parts]
            whole = [split for split in splits if split is not None]
            if len(whole) < len(splits):
                return None
            return _either([s[0] for s in whole]), _either([s[1] for s in whole])
        case Parts(parts=parts) if parts:
            at = len(parts) - 1 if last else 0
            rest = parts[:at] if last else parts[1:]
            split = _split(name, parts[at], last)
            if split is None or any(name in names_in(part) for part in rest):
                return None
            again, done = (n and Parts((*rest, n) if last else (n, *rest)) for n in split)
            return again, done
        case _:
            return None if name in names_in(node) else (None, node)


def _either(nodes: list[Node | None]) -> Node | None:
    given = tuple(node for node in nodes if node is not None)
    return Parts(given, one_of=True) if given else None
