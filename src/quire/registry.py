"""Names that stand for code: a table of `name -> "module:attribute"`, imported on first use.

A registry keeps start-up cheap (a row costs nothing until someone asks for it) and turns a wrong
name into one error that lists what exists. It does not know what its values are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar, cast

from quire.errors import ConfigError, StartupError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name a reader most likely meant, or `None` if nothing is close."""
    import difflib

    by_lower = {entry.lower(): entry for entry in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


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
        error: type[StartupError] = ConfigError,
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
            StartupError: (or the class given at construction) there is no such row; the nearest
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
