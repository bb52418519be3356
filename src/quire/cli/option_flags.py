"""Flags from the fields of an options dataclass, and the dataclass from what was given.

A field has its help, and perhaps its group, in `metadata`; its annotation says how text is read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any, TypeVar, get_type_hints

from quire.cli.parser import Parser
from quire.config.cli import show

T = TypeVar("T")


def add_option_flags(parser: Parser, options: type, group: str = "Options") -> None:
    """Add a flag per field of a dataclass."""
    hints = get_type_hints(options)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(options):
        title = field.metadata.get("group", group)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        flag = "--" + field.name.replace("_", "-")
        how = _how(hints[field.name])
        groups[title].add_argument(flag, default=argparse.SUPPRESS, help=_help(field), **how)


def options_from(namespace: argparse.Namespace, options: type[T]) -> T:
    """The dataclass, from the flags that were given.

    Raises:
        ConfigError: a value is out of range.
    """
    names = [field.name for field in dataclasses.fields(options)]  # type: ignore[arg-type]
    return options(**{name: getattr(namespace, name) for name in names if hasattr(namespace, name)})


def _how(kind: Any) -> dict[str, Any]:
    if kind is bool:
        return {"action": "store_true"}
    if kind == bool | None:
        return {"action": argparse.BooleanOptionalAction}
    if kind == list[str]:
        return {"nargs": "+", "metavar": "TEXT"}
    if kind == dict[str, Any]:
        return {"type": _json_object, "metavar": "JSON"}
    if kind in (int, int | None):
        return {"type": int, "metavar": "N"}
    if kind in (float, float | None):
        return {"type": float, "metavar": "N"}
    return {"metavar": "TEXT"}


def _help(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata["help"]).replace("%", "%%")
    empty = field.default in (None, "", False, dataclasses.MISSING)
    return text if empty else f"{text} Default: {show(field.default)}."


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value
