"""Names that stand for code: a table of `name -> "module:attribute"`, imported on first use.

A registry keeps start-up cheap (a row costs nothing until someone asks for it) and turns a wrong
name into one error that lists what exists. It does not know what its values are.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Generic, TypeVar, cast

from quire.errors import ConfigError, QuireError

T = TypeVar("T")

_LONGEST: Final = 64
"""Letters of a name that are compared: it may come from a request."""


CUTOFF: Final = 0.8
"""Likeness (`difflib`'s ratio) from which one name can be a misspelling of another."""
CUTOFF_OF_WORDS: Final = 0.6
"""The same for a name that only lacks words of the other (`max-seqs`: `max-num-seqs`), and for the
words that differ between two."""
LOWERS_SECURITY: Final = ("allow-", "trust-", "insecure", "unsafe", "disable-auth")
"""Names that begin so are never suggested: nobody shall open a door because of a typing error."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name a reader most likely meant, or `None` if nothing is close.

    A far-fetched suggestion is worse than none: it is followed.
    """
    plain = {_plain(entry): entry for entry in known}
    wanted = _plain(name[:_LONGEST])
    likeness = {
        entry: _likeness(wanted, entry)
        for entry in plain
        if entry and not entry.removeprefix("no-").startswith(LOWERS_SECURITY)
    }
    best = max(likeness, key=likeness.__getitem__, default="")
    return plain[best] if likeness.get(best) else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").strip("-")


def _likeness(wanted: str, entry: str) -> float:
    """How like two names are; 0 if one is hardly meant by the other."""
    import difflib

    def ratio(a: str, b: str) -> float:
        return difflib.SequenceMatcher(None, b, a).ratio()

    if min(len(wanted), len(entry)) >= 3 and _one_slip(wanted, entry):
        return 1.0
    words, others = wanted.split("-"), entry.split("-")
    rest = "-".join(word for word in words if word not in others)
    lacks = "-".join(word for word in others if word not in words)
    if rest and lacks and ratio(rest, lacks) < CUTOFF_OF_WORDS:
        return 0.0  # a whole word differs: it is something else
    like = ratio(wanted, entry)
    return like if like >= (CUTOFF if rest else CUTOFF_OF_WORDS) else 0.0


def _one_slip(a: str, b: str) -> bool:
    """Whether one letter is missing, too many or another, or two neighbours are swapped."""
    same = len(os.path.commonprefix((a, b)))
    a, b = a[same:], b[same:]
    swapped = a[:2] == b[1::-1] and a[2:] == b[2:]
    return a[1:] == b or a == b[1:] or a[1:] == b[1:] or swapped


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The rest of an error sentence: `; did you mean 'x'?`, or nothing."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


class Registry(Generic[T]):
    """Lazy rows of one kind of thing.

    A row is either a string `"package.module:attribute"`, imported when asked for, or the value
    itself (for plug-ins that already hold it).
    """

    def __init__(
        self,
        kind: str,
        rows: Mapping[str, str | T] | None = None,
        *,
        error: type[QuireError] = ConfigError,
    ) -> None:
        """`kind` names the thing in errors ("scheduling policy"); `error` is what is raised."""
        self.kind = kind
        self._rows: dict[str, str | T] = dict(rows or {})
        self._loaded: dict[str, T] = {}
        self._error = error

    def register(self, name: str, target: str | T) -> None:
        """Add a row.

        Raises:
            ValueError: the name is taken. Rows are never replaced in silence.
        """
        if name in self._rows:
            raise ValueError(f"{self.kind} {name!r} is registered already")
        self._rows[name] = target

    def get(self, name: str) -> T:
        """The value of a row, imported on first use.

        Raises:
            QuireError: (or the class given at construction) there is no such row; the nearest
                name and all names are told.
        """
        if name not in self._rows:
            raise self._error(self._unknown(name))
        if name not in self._loaded:
            target = self._rows[name]
            self._loaded[name] = cast(T, load(target)) if isinstance(target, str) else target
        return self._loaded[name]

    def target(self, name: str) -> str:
        """Where a row's value lives, as text, without importing it (for documentation)."""
        row = self._rows[name]
        return row if isinstance(row, str) else f"{type(row).__module__}:{type(row).__qualname__}"

    def _unknown(self, name: str) -> str:
        names = ", ".join(sorted(self._rows)) or "none"
        hint = did_you_mean(name, self._rows)
        return f"unknown {self.kind} {name!r}{hint or '.'} Known: {names}"

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def load(target: str) -> object:
    """Import `"package.module:attribute"`.

    Raises:
        ValueError: the target is not written that way.
        ImportError: the module or the attribute does not exist.
    """
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"expected 'package.module:attribute', got {target!r}")
    import importlib

    module = importlib.import_module(module_name)
    try:
        return cast(object, getattr(module, attribute))
    except AttributeError:
        raise ImportError(f"module {module_name!r} has no attribute {attribute!r}") from None
