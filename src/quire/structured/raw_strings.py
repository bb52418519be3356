"""Strings that are written without quotes and escapes, as expressions of terminals in Lark.

What JSON Schema says of a string, said of its text. Knows no syntax of calls.
"""

from __future__ import annotations

import re
from typing import Any, Final

from quire.structured import lark

ANY: Final = "/(?s:.*)/"
KEYWORDS: Final = ("pattern", "minLength", "maxLength", "format")
"""What restricts a string."""
_DATE: Final = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
FORMATS: Final[dict[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,7}}",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{_LABEL}(?:\.{_LABEL}){{1,7}}",
}
"""Regular expressions of formats; each of their texts has the format, not the reverse (a date is
never the 29th of February)."""


def raw_string(schema: dict[str, Any]) -> str | None:
    """The texts of a string; `None`: its format is not known.

    Args:
        schema: With the keywords of a string.
    """
    parts = []
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        parts.append(f"/(?s:.{{{least},{most}}})/")
    if "pattern" in schema:
        parts.append(lark.regex(anchored(schema["pattern"])))
    if "format" in schema:
        if schema["format"] not in FORMATS:
            return None
        parts.append(lark.regex(FORMATS[schema["format"]]))
    return " & ".join(parts) or ANY


def anchored(pattern: str) -> str:
    """A regular expression that is searched for in a text, as one that the whole text matches."""
    ways = []
    for way in _ways(pattern):
        start = way.startswith("^")
        end = re.search(r"(?<!\\)(?:\\\\)*\$\Z", way) is not None
        inner = way[start : len(way) - end]
        ways.append(f"{'' if start else '(?s:.*)'}(?:{inner}){'' if end else '(?s:.*)'}")
    return "|".join(ways)


def _ways(pattern: str) -> list[str]:
    """The alternatives of a regular expression, outside of groups and sets."""
    ways, depth, start, at = [], 0, 0, 0
    in_set = False
    while at < len(pattern):
        here = pattern[at]
        if here == "\\":
            at += 1
        elif in_set:
            in_set = here != "]"
        elif here == "[":
            in_set = True
            at += pattern[at + 1 : at + 2] == "^"
            at += pattern[at + 1 : at + 2] == "]"
        elif here in "()":
            depth += 1 if here == "(" else -1
        elif here == "|" and depth == 0:
            ways.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*ways, pattern[start:]]
