"""Flags that say which form the output of `chat` and `complete` has. Knows no grammar."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from quire.cli.parser import Parser
from quire.errors import ConfigError

_FLAGS: Final[dict[str, tuple[str, dict[str, Any], str]]] = {
    "json_schema": (
        "json", {"metavar": "FILE"}, "The output is JSON that a schema in this file allows.",
    ),
    "json_object": ("json_object", {"action": "store_true"}, "The output is any JSON object."),
    "regex": ("regex", {"metavar": "PATTERN"}, "The output matches this pattern."),
    "choice": ("choice", {"metavar": "TEXT", "nargs": "+"}, "The output is one of these."),
    "grammar": (
        "grammar", {"metavar": "FILE"},
        "The output follows the Lark, EBNF or GBNF grammar in this file.",
    ),
    "structural_tag": (
        "structural_tag", {"metavar": "FILE"},
        "The output is free text with sections as the structural tag in this file has them.",
    ),
}  # fmt: skip
"""For each flag: the kind of `structured_outputs`, what the parser is told, and the help."""


def add_form_flags(parser: Parser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("Form of the output")
    for name, (_, told, text) in _FLAGS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, default=argparse.SUPPRESS, help=text, **told)


def form_of(namespace: argparse.Namespace) -> dict[str, Any]:
    """The form that was asked for, as the option `structured_outputs`; empty without one.

    Raises:
        ConfigError: a file cannot be read.
    """
    form = {}
    for name, (kind, told, _) in _FLAGS.items():
        if hasattr(namespace, name):
            value = getattr(namespace, name)
            form[kind] = _read(value) if told.get("metavar") == "FILE" else value
    return {"structured_outputs": form} if form else {}


def _read(name: str) -> str:
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from None
