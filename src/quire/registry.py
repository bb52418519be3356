"""Names that stand for code: a table of `name -> "module:attribute"`, imported on first use.

A registry keeps start-up cheap (a row costs nothing until someone asks for it) and turns a wrong
name into one error that lists what exists. Tables that users may extend also find rows in installed
distributions (`quire/plugins.py`): only when they are asked for a name that they do not have, or
for all names. A registry does not know what its values are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from quire.errors import ConfigError, QuireError
from quire.spelling import did_you_mean

if TYPE_CHECKING:
    from quire.plugins import Plugin

T = TypeVar("T")


class Registry(Generic[T]):
    """Lazy rows of one kind of thing.

    A row is either a string `"package.module:attribute"`, imported when asked for, or the value
    itself.

    Args:
        kind: What a row is, for errors: "scheduling policy".
        rows: The built-in ones.
        error: Raised if a row does not exist or cannot be used.
        plugins: The table's name in entry points; `None` if it cannot be extended from outside.
        subclass_of, instance_of: `"module:Class"`, what a row's value must be. Plugins are held to
            it before anything else meets them.
    """

    def __init__(
        self,
        kind: str,
        rows: Mapping[str, str | T] | None = None,
        *,
        error: type[QuireError] = ConfigError,
        plugins: str | None = None,
        subclass_of: str | None = None,
        instance_of: str | None = None,
    ) -> None:
        self.kind = kind
        self.plugins = plugins
        self._rows: dict[str, str | T] = dict(rows or {})
        self._loaded: dict[str, T] = {}
        self._error = error
        self._subclass_of, self._instance_of = subclass_of, instance_of

    def register(self, name: str, target: str | T) -> None:
        """Add a row, in this process only. An engine core of its own does not see it: what a server
        shall find belongs into an entry point.

        Raises:
            ConfigError: the name is taken. Rows are never replaced in silence.
        """
        if name in self._rows:
            raise ConfigError(f"{self.kind} {name!r} is registered already")
        self._rows[name] = target

    def get(self, name: str) -> T:
        """The value of a row, imported on first use.

        Raises:
            QuireError: (or the class given at construction) there is no such row, and the error
                tells the nearest name and all names; or it is of a plugin and cannot be used.
        """
        if name not in self._loaded:
            if name in self._rows:
                row = self._rows[name]
                found = cast(T, load(row)) if isinstance(row, str) else row
                self._check(found, f"{self.kind} {name!r}")
            else:
                found = self._from_plugin(name)
            self._loaded[name] = found
        return self._loaded[name]

    def at(self, target: str, given_as: str) -> T:
        """The value at `"package.module:attribute"`, which need not be a row.

        Only for places that an operator names: importing runs code.

        Args:
            target: The place.
            given_as: What the error begins with, say the flag and its value.

        Raises:
            QuireError: it cannot be imported, or is not of this table's kind.
        """
        try:
            found = load(target)
        except Exception as error:
            # Code of others can fail in any way while it is imported. Its traceback is for the log.
            from quire.logger import get_logger

            get_logger(__name__).debug("%s", given_as, exc_info=True)
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise self._error(f"{given_as} cannot be imported: {what}") from None
        self._check(found, given_as)
        return cast(T, found)

    def target(self, name: str) -> str:
        """Where a row's value lives, as text, without importing it (for documentation)."""
        row = self._rows[name]
        return row if isinstance(row, str) else f"{type(row).__module__}:{type(row).__qualname__}"

    def names(self) -> list[str]:
        """All names, those of plugins last."""
        return [*self._rows, *(name for name in self._plugins() if name not in self._rows)]

    def _check(self, found: object, what: str) -> None:
        if self._subclass_of is not None:
            base = cast(type, load(self._subclass_of))
            if not (isinstance(found, type) and issubclass(found, base)):
                raise self._error(f"{what} is not a subclass of {_dotted(self._subclass_of)}")
        if self._instance_of is not None and not isinstance(
            found, cast(type, load(self._instance_of))
        ):
            raise self._error(f"{what} is not an instance of {_dotted(self._instance_of)}")

    def _plugins(self) -> Mapping[str, Plugin]:
        if self.plugins is None:
            return {}
        # Imported here: reading metadata of distributions is work that a plain start does not do.
        from quire.plugins import plugins_of

        return plugins_of(self.plugins, self._rows)

    def _from_plugin(self, name: str) -> T:
        plugin = self._plugins().get(name)
        if plugin is None:
            names = ", ".join(sorted(self.names())) or "none"
            hint = did_you_mean(name, self.names())
            raise self._error(f"unknown {self.kind} {name!r}{hint or '.'} Known: {names}")
        what = f"{self.kind} {name!r} ({plugin})"
        if plugin.rival is not None:
            raise self._error(f"{what} is also offered by {plugin.rival}: uninstall one of them")
        return self.at(plugin.target, what)

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in self._plugins()

    def __iter__(self) -> Iterator[str]:
        """Names of the rows that need no search: built-in ones and those registered by code."""
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _dotted(target: str) -> str:
    return target.replace(":", ".")


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
