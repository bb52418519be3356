"""Checked access to those entries of `config.json` that only some families have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError


def whole(shape: ModelShape, name: str, default: int | None = None, least: int = 1) -> int:
    """An integer of at least `least`; `default` if the entry is missing or null.

    Raises:
        ModelLoadError: it is something else, or missing without a default.
    """
    value = shape.raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelLoadError(
            f"config.json: {name!r} must be an integer of at least {least}, got {value!r:.60}"
        )
    return value


def number(shape: ModelShape, name: str, default: float) -> float:
    """A number; `default` if the entry is missing or null.

    Raises:
        ModelLoadError: it is something else.
    """
    value = shape.raw.get(name)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ModelLoadError(f"config.json: {name!r} must be a number, got {value!r:.60}")
    return float(value)


def integers(shape: ModelShape, name: str) -> tuple[int, ...]:
    """A list of integers; empty if the entry is missing or null.

    Raises:
        ModelLoadError: it is something else.
    """
    value = shape.raw.get(name) or []
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ModelLoadError(f"config.json: {name!r} must be a list of integers, got {value!r:.60}")
    return tuple(value)


def limit(entries: Mapping[str, Any], name: str) -> float:
    """A number above 0; 0 if the entry is missing or null, which means no limit.

    Raises:
        ModelLoadError: it is something else.
    """
    value = entries.get(name)
    if value is None:
        return 0.0
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ModelLoadError(f"config.json: {name!r} must be a number above 0, got {value!r:.60}")
    return float(value)
