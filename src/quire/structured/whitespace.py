"""Whitespace between the tokens of JSON: how much there may be by default, and what a request may
say.

A grammar that allows any whitespace lets a model go on with newlines until it has no tokens left.
"""

from __future__ import annotations

import re
from typing import Final

from quire.errors import InvalidRequest

DEFAULT: Final = r"[ \t\n\r]{1,8}"
"""At most 8 characters in a row: enough for a newline and an indentation, and soon over."""
_PART: Final = re.compile(
    r"\[(?: |\t|\n|\r|\\[tnrs])+\]|\\[tnrs]|[ \t\n\r]|[*+?]|\{\d+(?:,\d*)?\}|[()|]|\?:"
)


def read_pattern(given: str) -> str:
    """A request's `whitespace_pattern`, of which only whitespace that JSON has can come.

    `\\s` stands for the four characters that JSON allows.

    Raises:
        InvalidRequest: something else is in it.
    """
    at = 0
    while at < len(given):
        part = _PART.match(given, at)
        if part is None:
            got = f"{given[at : at + 10]!r} at position {at}"
            raise InvalidRequest(
                "structured_outputs.whitespace_pattern must be made of spaces, \\t, \\n, \\r, \\s, "
                f"sets of these, groups and repetitions, got {got}.",
                param="structured_outputs.whitespace_pattern",
            )
        at = part.end()
    inside = re.sub(r"\[[^\]]*\]", lambda s: s[0].replace("\\s", " \\t\\n\\r"), given)
    return inside.replace("\\s", "[ \\t\\n\\r]")
