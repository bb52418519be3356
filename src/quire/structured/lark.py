"""The bits of Lark that grammars are put together from, and a reader that finds JSON schemas in it.

llguidance's dialect: strings are JSON strings, regexes stand between slashes, `%json {...}` is a
schema. Knows no request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

from quire.errors import InvalidRequest

SchemaForm = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes of a schema what is compiled."""
_TOKEN: Final = re.compile(
    r"""(?P<skip>//[^\n]*|\#[^\n]*|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/)"""
    r"""|(?P<json>%json\b[ \t\r\n]*)|(?P<options>%llguidance\b)|(?P<regex>%regex\b)"""
)


def string(text: str) -> str:
    """A string literal."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A regex literal that must match as a whole."""
    # In llguidance a slash within slashes is escaped, and a newline cannot stand there.
    out, escaped = [], False
    for char in pattern:
        if char == "\n":
            out.append("n" if escaped else "\\n")
        elif char == "/" and not escaped:
            out.append("\\/")
        else:
            out.append(char)
        escaped = char == "\\" and not escaped
    return f"/{''.join(out)}/"


def with_json_options(text: str, form: SchemaForm) -> str:
    """A Lark grammar of a request, with each of its schemas in the form that is compiled.

    Raises:
        InvalidRequest: a schema is no JSON object or cannot be enforced, or the grammar sets
        options
            of the compiler.
    """
    out: list[str] = []
    at = 0
    while found := _TOKEN.search(text, at):
        if found["options"] is not None:
            raise _at(
                text,
                found.start(),
                "%llguidance is not allowed: options are fields of structured_outputs",
            )
        out.append(text[at : found.end()])
        at = found.end()
        if found["json"] is not None:
            try:
                schema, at = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):
                raise _at(text, found.start(), "%json must be followed by a JSON object") from None
            if not isinstance(schema, dict):
                raise _at(text, found.start(), "%json must be followed by a JSON object")
            out.append(json.dumps(form(schema)))
    return "".join(out) + text[at:]


def _at(text: str, at: int, what: str) -> InvalidRequest:
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return InvalidRequest(
        f"structured_outputs.grammar: line {line}, column {column}: {what}.",
        param="structured_outputs.grammar",
    )
