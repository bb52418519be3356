"""Flags from the fields of an options dataclass, and the dataclass from what was given.

A field has its help, and perhaps its group, in `metadata`, or the command has it; its annotation
says how text is read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from quire.cli.parser import Parser
from quire.config.cli import show

T = TypeVar("T")


def add_option_flags(
    parser: Parser,
    options: type,
    group: str = "Options",
    *,
    help: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    also: Mapping[str, str] | None = None,
) -> None:
    """Add a flag per field of a dataclass.

    Args:
        parser: Gets them.
        options: The dataclass.
        group: Their title in the help, where a field has none.
        help: Fields to make flags of, and what they are; without it all, as their `metadata` says.
        defaults: Of this command, where they differ; the namespace has these names in any case.
        also: Further spellings of the flags of some fields.
    """
    hints = get_type_hints(options)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(options):
        if help is not None and field.name not in help:
            continue
        title = field.metadata.get("group", group)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        flags = ["--" + field.name.replace("_", "-")]
        if field.name in (also or {}):
            flags.append((also or {})[field.name])
        default = (defaults or {}).get(field.name, field.default)
        text = field.metadata["help"] if help is None else help[field.name]
        how = _how(hints[field.name])
        groups[title].add_argument(
            *flags, default=argparse.SUPPRESS, help=_help(text, default), **how
        )
        if field.name in (defaults or {}):
            parser.set_late_default(field.name, default)


def options_from(namespace: argparse.Namespace, options: type[T], **changed: Any) -> T:
    """The dataclass, from the flags that were given, with some fields changed.

    Raises:
        ConfigError: a value is out of range.
    """
    names = [field.name for field in dataclasses.fields(options)]  # type: ignore[arg-type]
    given = {name: getattr(namespace, name, None) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    return options(**{**given, **changed})


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


def _help(text: str, default: Any) -> str:
    text = text.replace("%", "%%")
    empty = default is dataclasses.MISSING or default is False or default in (None, "")
    return text if empty else f"{text} Default: {show(default)}."


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value
