"""Finds out from a chat template how much work it can cause, so that only templates that are known
to be cheap are rendered where nothing can kill them.

A cheap template loops over what it is given and over nothing else, makes no text that can grow
faster than what it is given, and calls nothing but what is listed here. How often the body of its
innermost loop can run is then bounded: a loop over parts of what the enclosing loop is at takes one
turn per part of the whole, and every other loop within a loop multiplies. `template_degree` is the
number of loops that multiply. Whatever is not known here makes a template one that is not known to
be cheap, which says nothing against it.

Reads Jinja's tree by the names of its nodes, and so imports no Jinja.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final

from quire.tokenizer.chat_template import template_tree

MAX_SOURCE: Final = 65_536
"""Characters of a cheap template."""
MAX_TREE: Final = 20_000
"""Nodes of a cheap template, with its macros written out."""
MAX_RANGE: Final = 100

_FILTERS: Final = frozenset((
    "tojson", "trim", "length", "count", "list", "first", "last", "string", "lower", "upper",
    "capitalize", "title", "items", "dictsort", "map", "select", "reject", "selectattr",
    "rejectattr", "default", "d", "int", "float", "safe", "e", "escape", "unique", "sort",
    "reverse", "min", "max", "abs", "round", "join", "replace", "indent",
))  # fmt: skip
_METHODS: Final = frozenset((
    "split", "rsplit", "strip", "lstrip", "rstrip", "startswith", "endswith", "items", "keys",
    "values", "get", "lower", "upper", "capitalize", "title", "find", "rfind", "index", "count",
    "splitlines", "removeprefix", "removesuffix", "join", "replace", "partition", "rpartition",
    "isdigit", "isalpha", "isspace", "copy",
))  # fmt: skip
_GROWING: Final = frozenset(("join", "replace", "indent"))
"""Of both: results grow with the arguments, so these must be short constants."""
_ESCAPING: Final = frozenset(("tojson", "e", "escape", "string"))
"""Their results are longer by a factor, again and again if a value is set to its own."""
_LISTS: Final = frozenset((
    "list", "items", "dictsort", "map", "select", "reject", "selectattr", "rejectattr", "unique",
    "sort", "reverse", "split", "rsplit", "splitlines", "partition", "rpartition", "keys", "values",
))  # fmt: skip
"""Of both: results are lists, and the text of a list is longer than its parts."""
_SMALL: Final = frozenset(("length", "count", "int", "float", "abs", "round"))
_PICKING: Final = frozenset(("first", "last"))
_COUNTERS: Final = frozenset(("index", "index0", "revindex", "revindex0", "length"))
_FUNCTIONS: Final = frozenset(("raise_exception", "strftime_now", "namespace", "dict"))
_CONDITIONS: Final = frozenset(("Compare", "Test", "Not"))
"""Whatever stands in them, a truth value comes out."""
_PLAIN: Final = frozenset((
    "Template", "Output", "TemplateData", "If", "Const", "Name", "Getattr", "Getitem", "Slice",
    "Compare", "Operand", "Test", "Not", "And", "Or", "CondExpr", "List", "Tuple", "Dict", "Pair",
    "Keyword", "Concat", "Add", "Sub", "Neg", "Pos", "FloorDiv", "Div", "NSRef", "Break",
    "Continue", "ExprStmt", "Scope", "Assign", "AssignBlock", "Filter", "FilterBlock", "Call",
    "For", "Macro", "Mod",
))  # fmt: skip


class _NotCheap(Exception):
    """The template may do more than can be bounded."""


@functools.lru_cache(maxsize=64)
def template_degree(source: str) -> int | None:
    """How many loops of a template multiply, or None if it is not known to be cheap.

    Raises:
        InvalidRequest: it has a syntax error.
    """
    if len(source) > MAX_SOURCE:
        return None
    try:
        return _Reader(template_tree(source)).degree()
    except _NotCheap:
        return None


def rendering_work(degree: int, given: object, limit: int) -> int:
    """At most how often the innermost part of a cheap template is passed, or more than `limit`.

    Args:
        degree: Of the template.
        given: Messages, tools and variables.
        limit: Counting ends there.
    """
    parts = chars = 0
    todo = [given]
    while todo and parts + chars <= limit:
        part = todo.pop()
        parts += 1
        if isinstance(part, str):
            chars += len(part)
        elif isinstance(part, dict):
            todo += part.values()
            chars += sum(len(key) for key in part if isinstance(key, str))
        elif isinstance(part, (list, tuple)):
            todo += part
    return int((parts + chars) * parts ** max(0, degree - 1))


class _Reader:
    """Reads one template's tree."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._macros: dict[str, Any] = {}
        self._assigned: dict[str, list[Any]] = {}
        """Values of names that are set."""
        self._open: list[str] = []
        """Macros that are being read."""
        self._count = 0
        for node in _all(tree):
            self._note(node)
        for node in _all(tree):
            self._check(node)

    def _note(self, node: Any) -> None:
        kind = _kind(node)
        if kind not in _PLAIN:
            raise _NotCheap
        if kind == "Macro":
            if node.name in self._macros or any(_kind(d) != "Const" for d in node.defaults):
                raise _NotCheap
            self._macros[node.name] = node
        elif kind in ("Assign", "AssignBlock"):
            value = node.node if kind == "Assign" else None
            for name in _targets(node.target):
                self._assigned.setdefault(name, []).append(value)

    def degree(self) -> int:
        """Of the whole."""
        return self._read(self._tree.body, frozenset(), 0)

    # ---- loops -------------------------------------------------------------------------------

    def _read(self, nodes: Any, innermost: frozenset[str], degree: int) -> int:
        """The most loops that multiply within some nodes.

        Args:
            nodes: To be read in order.
            innermost: What the innermost loop is at, and what was made of that.
            degree: Loops around them.
        """
        most = degree
        for node in nodes:
            self._count += 1
            if self._count > MAX_TREE:
                raise _NotCheap
            kind = _kind(node)
            if kind == "Macro":
                continue
            if kind == "For":
                if not self._is_given(node.iter):
                    raise _NotCheap
                parts = _root(node.iter) in innermost
                inner = frozenset(_targets(node.target))
                inside = max(1, degree) if parts else degree + 1
                most = max(most, self._read([node.iter], innermost, degree))
                most = max(
                    most,
                    self._read(
                        [*node.body, *([node.test] if node.test else [])],
                        self._made_of(inner),
                        inside,
                    ),
                )
                most = max(most, self._read(node.else_, innermost, degree))
                continue
            if kind == "Call" and _kind(node.node) == "Name" and node.node.name in self._macros:
                most = max(most, self._call(node, innermost, degree))
            most = max(most, self._read(node.iter_child_nodes(), innermost, degree))
        return most

    def _is_given(self, node: Any) -> bool:
        """Whether a loop goes over parts of what was given, over constants, or over a range."""
        match _kind(node):
            case "CondExpr":
                second = node.expr2 is None or self._is_given(node.expr2)
                return second and self._is_given(node.expr1)
            case "List" | "Tuple":
                return all(_kind(item) == "Const" for item in node.items)
            case "Call" if _kind(node.node) == "Name":
                return bool(node.node.name == "range")
            case _:
                root = _root(node)
                return root is not None and all(map(_is_alias, self._assigned.get(root, [])))

    def _made_of(self, names: frozenset[str]) -> frozenset[str]:
        """Names that stand for parts of what these stand for, wherever they are set."""
        while True:
            more = {
                name
                for name, values in self._assigned.items()
                if all(value is not None and _root(value) in names | {name} for value in values)
                and any(_root(value) in names for value in values)
            }
            if more <= names:
                return names
            names |= more

    def _call(self, node: Any, innermost: frozenset[str], degree: int) -> int:
        macro = self._macros[node.node.name]
        if macro.name in self._open or node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _NotCheap
        given = dict(zip((arg.name for arg in macro.args), node.args, strict=False))
        given |= {pair.key: pair.value for pair in node.kwargs}
        parts = frozenset(name for name, value in given.items() if _root(value) in innermost)
        self._open.append(macro.name)
        try:
            return self._read(macro.body, self._made_of(parts), degree)
        finally:
            self._open.pop()

    # ---- everything else ---------------------------------------------------------------------

    def _check(self, node: Any) -> None:
        if not self._is_bounded(node):
            raise _NotCheap

    def _is_bounded(self, node: Any) -> bool:
        match _kind(node):
            case "Filter" | "FilterBlock":
                one = node if _kind(node) == "Filter" else node.filter
                free = one.name not in (*_GROWING, "tojson", "map")
                return one.name in _FILTERS and (free or _constant(one))
            case "Call":
                return self._is_bounded_call(node)
            case "Mod":
                # A text on the left is a format, and may name any width.
                counts = _kind(node.left) == "Getattr" and node.left.attr in _COUNTERS
                return _kind(node.right) == "Const" and (counts or _is_length(node.left))
            case "Assign":
                return self._references(node.node) <= 1
            case "AssignBlock":
                escapes = node.filter is not None
                return sum(map(self._references, node.body)) <= (0 if escapes else 1)
            case "Const":
                large = isinstance(node.value, (int, float)) and abs(node.value) > 2**31
                return not large
            case _:
                return True

    def _is_bounded_call(self, node: Any) -> bool:
        called = node.node
        if _kind(called) == "Getattr":
            name = called.attr
            short = name not in _GROWING or _constant(node)
            return name in _METHODS and short and (name != "join" or _kind(called.node) == "Const")
        if _kind(called) != "Name" or called.name in self._assigned:
            return False
        if called.name == "range":
            return (
                not (node.kwargs or node.dyn_args or node.dyn_kwargs)
                and all(map(_is_length, node.args))
            )  # fmt: skip
        if called.name == "strftime_now":
            return _constant(node)
        return called.name in _FUNCTIONS or called.name in self._macros

    def _references(self, node: Any, *, picked: bool = False) -> int:
        """How many times names that are set, and so may have grown, are part of a value; 2 also
        stands for a value that is longer than its parts.

        Args:
            node: The value.
            picked: One part of it is taken, so that it may be a list.
        """
        kind = _kind(node)
        if kind in _CONDITIONS or (kind == "Filter" and node.name in _SMALL):
            return 0
        if kind == "CondExpr":
            second = 0 if node.expr2 is None else self._references(node.expr2)
            return max(self._references(node.expr1), second)
        if kind == "Getattr":
            return self._references(node.node)
        if kind == "Getitem":
            return self._references(node.node, picked=_kind(node.arg) != "Slice")
        if kind == "Name":
            return int(node.name in self._assigned)
        parts = list(node.iter_child_nodes())
        if kind == "Filter" and node.name in _PICKING:
            return sum(self._references(part, picked=True) for part in parts)
        found = sum(map(self._references, parts))
        if kind == "Filter":
            name = node.name
        elif kind == "Call" and _kind(node.node) == "Getattr":
            name = node.node.attr
        else:
            name = ""
        longer = (
            kind in ("For", "List", "Tuple", "Dict")
            or name in _ESCAPING
            or name in _GROWING
            or (name in _LISTS and not picked)
            or (kind == "Call" and _kind(node.node) == "Name")
        )
        if kind == "Call" and _kind(node.node) == "Name" and node.node.name in self._macros:
            found += self._sees(self._macros[node.node.name])
        return 2 * found if longer else found

    def _sees(self, macro: Any) -> int:
        """Whether a macro may show names that are set outside of it."""
        inside = {name for node in _all(macro) if _kind(node) in ("Assign", "AssignBlock")
                  for name in _targets(node.target)}  # fmt: skip
        calls = (
            node.name in self._assigned and node.name not in inside
            or node.name in self._macros
            for node in _all(macro)
            if _kind(node) == "Name"
        )  # fmt: skip
        return int(any(calls))


def _kind(node: Any) -> str:
    return type(node).__name__


def _all(tree: Any) -> Iterator[Any]:
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        todo += node.iter_child_nodes()


def _targets(target: Any) -> list[str]:
    if _kind(target) == "Tuple":
        return [name for item in target.items for name in _targets(item)]
    return [target.name] if _kind(target) in ("Name", "NSRef") else []


def _root(node: Any) -> str | None:
    """The name that a value is part of, if it is a part of one."""
    while node is not None:
        match _kind(node):
            case "Name":
                return str(node.name)
            case "Getattr" | "Getitem" | "Filter":
                node = node.node
            case "Call" if _kind(node.node) == "Getattr":
                node = node.node.node
            case _:
                return None
    return None


def _is_alias(node: Any) -> bool:
    """Whether a value is part of what was given, or empty."""
    match _kind(node):
        case "CondExpr":
            return _is_alias(node.expr1) and (node.expr2 is None or _is_alias(node.expr2))
        case "List":
            return not node.items
        case "Const":
            return True
        case _:
            return _root(node) is not None


def _is_length(node: Any) -> bool:
    """Whether a number is the length of something, plus or minus constants."""
    match _kind(node):
        case "Filter":
            return node.name in ("length", "count")
        case "Const":
            return isinstance(node.value, int) and abs(node.value) <= MAX_RANGE
        case "Neg":
            return _is_length(node.node)
        case "Add" | "Sub":
            return _is_length(node.left) and _is_length(node.right)
        case _:
            return False


def _constant(node: Any) -> bool:
    """Whether all arguments of a call or a filter are short constants."""
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    values = [*node.args, *(pair.value for pair in node.kwargs)]
    return all(
        _kind(value) == "Const" and (
            len(value.value) <= MAX_RANGE if isinstance(value.value, str)
            else isinstance(value.value, (bool, type(None)))
            or (isinstance(value.value, int) and abs(value.value) <= 16)
        )
        or (_kind(value) == "Tuple" and all(_kind(item) == "Const" for item in value.items))
        for value in values
    )  # fmt: skip
