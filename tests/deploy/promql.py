"""A small reader of PromQL: enough to find a misspelled metric, label or function, or a bracket
that is missing. It runs where no Prometheus can be had; it does not evaluate anything."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

FUNCTIONS = {"rate", "histogram_quantile", "sum", "max", "label_values"}
WORDS = {"by", "and", "or", "unless"}
COMMON = {"model_name", "engine", "instance", "job"}
DURATION = re.compile(r"\d+[smh]|\$__rate_interval")
_TOKEN = re.compile(
    r"\s+|(?P<string>\"[^\"]*\")|(?P<duration>\[[^\]]*\])|(?P<name>[A-Za-z_:][\w:]*)"
    r"|(?P<number>\d+(?:\.\d+)?)|(?P<sign>[(){},]|=~|!~|!=|==|<=|>=|[=<>+*/-])"
)


def problems(expr: str, names: Mapping[str, frozenset[str]]) -> list[str]:
    """What is wrong with an expression, given the series there are and their own labels."""
    return list(_problems(expr, names))


def _problems(expr: str, names: Mapping[str, frozenset[str]]) -> Iterator[str]:
    position = 0
    depth: list[str] = []
    metric, known = "", set(COMMON)
    tokens: list[tuple[str, str]] = []
    while position < len(expr):
        found = _TOKEN.match(expr, position)
        if found is None:
            yield f"cannot read {expr[position : position + 10]!r}"
            return
        position = found.end()
        if found.lastgroup:
            tokens.append((found.lastgroup, found.group()))
    for index, (kind, text) in enumerate(tokens):
        after = tokens[index + 1][1] if index + 1 < len(tokens) else ""
        if text in "({":
            depth.append(text)
        elif text in ")}":
            if not depth or depth.pop() + text not in ("()", "{}"):
                yield f"unexpected {text}"
        elif kind == "duration":
            if not DURATION.fullmatch(text[1:-1]):
                yield f"bad window {text}"
        elif kind == "name" and depth and depth[-1] == "{":
            if after in ("=", "=~", "!=", "!~") and text not in known:
                yield f"{metric} has no label {text}"
        elif kind == "name" and after in ("(", "by") and text not in WORDS:
            if text not in FUNCTIONS:
                yield f"unknown function {text}"
        elif kind == "name" and text not in WORDS and not _in_by(tokens, index):
            metric = text
            known = COMMON | names.get(text, frozenset())
            if text not in names:
                yield f"unknown metric {text}"
    if depth:
        yield f"missing the end of {''.join(depth)}"


def _in_by(tokens: list[tuple[str, str]], index: int) -> bool:
    """Whether a name stands in the brackets after `by`."""
    while index and tokens[index][1] not in "({":
        index -= 1
    return index > 0 and tokens[index - 1][1] == "by"
