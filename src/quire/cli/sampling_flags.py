"""Sampling flags that `chat` and `complete` share, and what they mean for an engine or a server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, Final

from quire.cli.parser import Parser
from quire.errors import ConfigError


def json_value(text: str) -> dict[str, Any]:
    """A JSON object; argparse names this function in its error."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(text)
    return found


_FLAGS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "max_tokens": (int, "Most tokens to generate."),
    "min_tokens": (int, "Tokens before which nothing ends the output."),
    "temperature": (float, "0 is greedy; higher is more varied."),
    "top_p": (float, "Smallest set of tokens whose probability reaches this."),
    "top_k": (int, "Only the k most likely tokens; 0: all."),
    "min_p": (float, "Only tokens at least this share as likely as the likeliest."),
    "presence_penalty": (float, "Against tokens that the output has, once each; -2 to 2."),
    "frequency_penalty": (float, "Against tokens that the output has, each time; -2 to 2."),
    "repetition_penalty": (float, "Against tokens of prompt and output; 1: none."),
    "seed": (int, "The same seed gives the same text."),
    "thinking_token_budget": (int, "Most tokens of reasoning; -1: no limit."),
    "repetition_detection": (
        json_value, "Ends an output that repeats itself: max_pattern_size, min_count and perhaps "
        "min_pattern_size, as JSON.",
    ),
}  # fmt: skip
_KINDS: Final[dict[Callable[[str], Any], tuple[str, str]]] = {
    int: ("N", "a whole number"), float: ("X", "a number"), json_value: ("JSON", "a JSON object"),
}  # fmt: skip
"""What a value is called in the help, and in errors."""


def add_sampling_flags(parser: Parser, **defaults: object) -> None:
    """Add the flags. `defaults` appear in the help only; the caller applies them."""
    group = parser.add_argument_group("Sampling")
    for name, (kind, text) in _FLAGS.items():
        told = f" Default: {defaults[name]}." if name in defaults else ""
        group.add_argument(
            "--" + name.replace("_", "-"), type=kind, default=argparse.SUPPRESS,
            metavar=_KINDS[kind][0], help=text + told,
        )  # fmt: skip
    group.add_argument(
        "--stop", nargs="+", action="extend", default=argparse.SUPPRESS, metavar="TEXT",
        help="Strings that end the output.",
    )  # fmt: skip


def given(namespace: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given."""
    return {n: getattr(namespace, n) for n in (*_FLAGS, "stop") if hasattr(namespace, n)}


def parse_value(name: str, text: str) -> tuple[str, Any]:
    """An option and its value, as typed: `temperature` and `0.5`.

    Raises:
        QuireError: there is no such option, or the value is not allowed.
    """
    name = name.replace("-", "_").lower()
    return checked(name, _read(name, text) if name in _FLAGS else [text])


def checked(name: str, value: Any) -> tuple[str, Any]:
    """The option and its value, if both are valid.

    Raises:
        QuireError: there is no such option, or the value is not allowed.
    """
    from quire.params import SamplingParams
    from quire.spelling import did_you_mean

    names = (*_FLAGS, "stop")
    if name not in names:
        hint = did_you_mean(name, names)
        raise ConfigError(f"unknown option {name!r}{hint or '.'} Known: {', '.join(names)}")
    SamplingParams(**{name: value})  # knows what is allowed
    return name, value


def _read(name: str, text: str) -> Any:
    kind = _FLAGS[name][0]
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name}: expected {_KINDS[kind][1]}, got {text!r}") from None
