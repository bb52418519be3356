"""How flags may be spelled: underscores, old names, dots into JSON objects.

Knows which flags a parser has, but not what they mean.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.config.cli import RENAMED, MergeFields, json_or_text
from quire.errors import ConfigError


def normalised(arguments: Sequence[str], known: Mapping[str, argparse.Action]) -> Iterator[str]:
    """Rewrite flags in the spelling that argparse knows: dashes for underscores, current names for
    old ones, and `--flag.key value` as JSON.

    Raises:
        ConfigError: a dotted flag has no value.
    """
    tokens = iter(arguments)
    for token in tokens:
        if token == "--":
            yield token
            yield from tokens
            return
        name, equals, value = token.partition("=")
        if token.startswith("--") and name not in known:
            name = "--" + name[2:].replace("_", "-")
            name = RENAMED.get(name, name)
        head, dot, key = name.partition(".")
        if not (dot and head.startswith("-") and isinstance(known.get(head), MergeFields)):
            yield name + equals + value if token.startswith("--") else token
            continue
        text = value if equals else next(tokens, None)
        if text is None:
            raise ConfigError(f"{name}: expected a value")
        yield f"{head}={_nested(key.replace('-', '_'), json_or_text(text))}"


def _nested(path: str, value: Any) -> str:
    """`a.b` and 1 as `{"a": {"b": 1}}`, in JSON."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return json.dumps(value)
