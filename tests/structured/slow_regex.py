"""A slow, plain automaton for regular expressions over a, b and c: sets of what is left to match.

A state is the set of expressions of which one must match the rest of the text. Reading a letter
takes the derivative (Brzozowski) of each. Nothing here is shared with what it checks."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

LETTERS = "abc"
Tree = tuple[Any, ...]
EMPTY: Tree = ("seq",)


def regexes() -> st.SearchStrategy[Tree]:
    """Trees: a letter, a set, any letter, one after the other, one of several, repetitions."""
    leaf = st.one_of(
        st.sampled_from(LETTERS).map(lambda c: ("set", c)),
        st.sampled_from(["ab", "bc", "abc"]).map(lambda s: ("set", s)),
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda p: ("seq", *p)),
            st.lists(inner, min_size=2, max_size=3).map(lambda p: ("or", *p)),
            st.tuples(inner, st.integers(0, 2), st.one_of(st.none(), st.integers(2, 3))).map(
                lambda r: ("rep", *r)
            ),
        ),
        max_leaves=8,
    )


def written(tree: Tree) -> str:
    """The tree as a pattern."""
    match tree:
        case ("set", letters):
            return f"[{letters}]"
        case ("seq", *parts):
            return "".join(map(written, parts))
        case ("or", *parts):
            return f"(?:{'|'.join(map(written, parts))})"
        case ("rep", body, least, most):
            return f"(?:{written(body)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(tree)


def matches_nothing(tree: Tree) -> bool:
    """Whether the empty text matches."""
    match tree:
        case ("set", _):
            return False
        case ("seq", *parts):
            return all(map(matches_nothing, parts))
        case ("or", *parts):
            return any(map(matches_nothing, parts))
        case ("rep", body, least, _):
            return least == 0 or matches_nothing(body)
    raise AssertionError(tree)


def after(tree: Tree, letter: str) -> frozenset[Tree]:
    """What may be left to match when a letter has been read."""
    match tree:
        case ("set", letters):
            return frozenset({EMPTY}) if letter in letters else frozenset()
        case ("seq",):
            return frozenset()
        case ("seq", first, *rest):
            found = {("seq", left, *rest) for left in after(first, letter)}
            if matches_nothing(first):
                found |= after(("seq", *rest), letter)
            return frozenset(found)
        case ("or", *parts):
            return frozenset().union(*(after(part, letter) for part in parts))
        case ("rep", body, least, most):
            if most == 0:
                return frozenset()
            rest = ("rep", body, max(0, least - 1), None if most is None else most - 1)
            return frozenset(("seq", left, rest) for left in after(body, letter))
    raise AssertionError(tree)


class Slow:
    """The automaton of one expression."""

    def __init__(self, tree: Tree) -> None:
        self.pattern = written(tree)
        self.start: frozenset[Tree] = frozenset({tree})

    def read(self, at: frozenset[Tree], text: str) -> frozenset[Tree]:
        """The state after a text."""
        for letter in text:
            at = frozenset().union(*(after(tree, letter) for tree in at))
        return at

    def accepts(self, at: frozenset[Tree]) -> bool:
        """Whether the text may end here."""
        return any(map(matches_nothing, at))

    def live(self, at: frozenset[Tree]) -> bool:
        """Whether any text may end somewhere from here: no expression of these matches nothing."""
        return bool(at)
