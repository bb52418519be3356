"""Sampling flags that `chat` and `complete` share, and what they mean for an engine or a server."""

from __future__ import annotations

import argparse
from typing import Any, Final

from quire.cli.parser import Parser
from quire.errors import ConfigError

_FLAGS: Final[dict[str, tuple[type, str]]] = {
    "max_tokens": (int, "Most tokens to generate."),
    "temperature": (float, "0 is greedy; higher is more varied."),
    "top_p": (float, "Smallest set of tokens whose probability reaches this."),
    "top_k": (int, "Only the k most likely tokens; 0: all."),
    "seed": (int, "The same seed gives the same text."),
}


def add_sampling_flags(parser: Parser, **defaults: object) -> None:
    """Add the flags; `defaults` are told in the help, `options` applies them."""
    group = parser.add_argument_group("Sampling")
    for name, (kind, text) in _FLAGS.items():
        told = f" Default: {defaults[name]}." if name in defaults else ""
        group.add_argument(
            "--" + name.replace("_", "-"), type=kind, default=argparse.SUPPRESS,
            metavar="N" if kind is int else "X", help=text + told,
        )  # fmt: skip
    group.add_argument(
        "--stop", nargs="+", action="extend", default=argparse.SUPPRESS, metavar="TEXT",
        help="Strings that end the output.",
    )  # fmt: skip


def given(namespace: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given."""
    return {n: getattr(namespace, n) for n in (*_FLAGS, "stop") if hasattr(namespace, n)}


def parse_assignment(text: str) -> tuple[str, Any]:
    """`temperature=0.5` as a name and a value.

    Raises:
        ConfigError: there is no such option, or the value is not a number.
    """
    from quire.registry import did_you_mean

    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    if name == "stop" and equals:
        return name, [value]
    if name not in _FLAGS:
        known = ", ".join((*_FLAGS, "stop"))
        hint = did_you_mean(name, _FLAGS)
        raise ConfigError(f"unknown option {name!r}{hint or '.'} Known: {known}")
    kind = _FLAGS[name][0]
    try:
        return name, kind(value)
    except ValueError:
        raise ConfigError(f"{name}: expected a number, got {value!r}") from None
