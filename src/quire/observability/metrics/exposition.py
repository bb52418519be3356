"""Prometheus text of metric families. Writing the text is what a scrape costs, so it is written
fast.

Names and labels hardly ever change, so the beginning of each line is cached, and a line costs one
lookup and one number. The format is Prometheus' text format 0.0.4,
https://prometheus.io/docs/instrumenting/exposition_formats/. Needs no package: a family is anything
with `name`, `documentation`, `type` and `samples` (of `name`, `labels` and `value`), as
`prometheus_client` has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

REMEMBERED: Final = 65_536
"""Cached beginnings of lines. Labels come from tables and not from callers, so there are few; this
bounds them all the same."""


def render(families: Iterable[Any]) -> bytes:
    """The text of all families, in order. Timestamps and exemplars of samples are left out."""
    lines: list[str] = []
    for family in families:
        lines.append(_head(family.name, family.documentation, family.type))
        for sample in family.samples:
            labels = sample.labels
            start = _start(sample.name, tuple(labels), tuple(labels.values()))
            lines.append(f"{start}{number(sample.value)}\n")
    return "".join(lines).encode()


def number(value: float) -> str:
    """A number as the format spells it; whole numbers are written like `1.0`, too."""
    value = float(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


@lru_cache(4096)
def _head(name: str, text: str, kind: str) -> str:
    """The two lines before the samples. This format calls a counter by the name of its samples."""
    if kind == "counter":
        name += "_total"
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


@lru_cache(REMEMBERED)
def _start(name: str, labels: tuple[str, ...], values: tuple[str, ...]) -> str:
    """`name{label="value",...} `, labels in alphabetical order."""
    if not labels:
        return f"{name} "
    pairs = dict(zip(labels, values, strict=True))
    return f"{name}{{{_label_text(pairs)}}} "


def _label_text(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
