"""Members that exist to say why they are not available."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from quire.errors import NotAvailable

Kind = TypeVar("Kind", bound=type)


def _absent(name: str, why: str) -> Callable[..., NoReturn]:
    def use(*_: Any, **__: Any) -> NoReturn:
        raise NotAvailable(f"{name} is not available: {why}.")

    use.__name__ = name
    use.__doc__ = f"Not available: {why}."
    use.refused = why  # type: ignore[attr-defined]
    return use


def absent(table: Mapping[str, str]) -> Callable[[Kind], Kind]:
    """Give a class the members of `table`, each refusing with its sentence when it is called."""

    def fill(kind: Kind) -> Kind:
        for name, why in table.items():
            assert name not in vars(kind), f"{name} exists now: delete its row"
            setattr(kind, name, _absent(f"{kind.__name__}.{name}", why))
        return kind

    return fill
