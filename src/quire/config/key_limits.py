"""What a key of the key file may use: the limits, how they are written, and what is wrong with one.

Knows neither who counts nor what becomes of a request that is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

from quire.errors import ConfigError

MOST: Final = 10**12
"""Largest whole number that a limit can be."""
_WHOLE: Final = re.compile(r"[0-9]{1,13}")
_SHARE: Final = re.compile(r"[0-9]{0,3}\.?[0-9]{1,9}|[0-9]\.")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; `None`: there is none."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and outputs together."""
    concurrent: int | None = None
    """HTTP requests that are being answered at a time."""
    queue_share: float | None = None
    """How much of the bounded queue its requests may take, above 0 and at most 1."""

    def given(self) -> dict[str, int | float]:
        """The limits that there are, by name."""
        values = {name: getattr(self, name) for name in KEY_LIMITS}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        """As a line of the key file has them."""
        return ",".join(f"{name}={value}" for name, value in self.given().items())


def _whole(name: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text) if _WHOLE.fullmatch(text) else 0
        if not 1 <= value <= MOST:
            raise ConfigError(f"{name} must be a whole number from 1 to {MOST}, got {text[:40]!r}")
        return value

    return read


def _share(name: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text) if _SHARE.fullmatch(text) else 0.0
        if not 0 < value <= 1:
            raise ConfigError(
                f"{name} must be a part of the queue, above 0 and at most 1, got {text[:40]!r}"
            )
        return value

    return read


KEY_LIMITS: Final = tuple(field.name for field in fields(KeyLimits))
READ_LIMIT: Final[dict[str, Callable[[str], Any]]] = {
    name: (_share if name == "queue_share" else _whole)(name) for name in KEY_LIMITS
}
"""Limit to what reads its value, which raises `ConfigError`."""


def read_limits(text: str) -> KeyLimits:
    """Limits as `name=value,name=value`.

    Raises:
        ConfigError: there is no such limit, it is given twice, or its value is not valid.
    """
    values: dict[str, Any] = {}
    for one in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = one.partition("=")
        if name not in READ_LIMIT or not equals or name in values:
            raise ConfigError(
                f"limits are {', '.join(KEY_LIMITS)}, each at most once, as limit=value, "
                f"got {one[:60]!r}"
            )
        values[name] = READ_LIMIT[name](value)
    return KeyLimits(**values)
