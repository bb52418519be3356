"""The result of `quire bench engine` as a Markdown table, with what it compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.bench.engine.options import PEERS


def engine_text(report: Mapping[str, Any]) -> str:
    """Cases, rates and ratios, how near quire is to the limit on paper, and each engine's build and
    settings."""
    return "\n".join([*_table(report), "", *_about(report)])


def _table(report: Mapping[str, Any]) -> Iterator[str]:
    peers, machine = list(report["ratios"]), report["machine"]
    yield (
        f"{report['model']}, quire {report['version']}, {machine['cores']} cores of "
        f"{machine['cpu']}; tokens per second, medians of {report['rounds']} rounds in turns; "
        "ratio: how many times as fast quire is."
    )
    yield ""
    heads = [text for peer in peers for text in (PEERS[peer], "ratio")]
    yield "| case | quire | " + " | ".join([*heads, "of the limit on paper"]) + " |"
    yield "|---" + "|---:" * (2 + len(heads)) + "|"
    for case, row in report["results"].items():
        cells = [case, str(row["quire"]["tokens_per_second"])]
        for peer in peers:
            cells += [_rate(row[peer]), str(report["ratios"][peer][case])]
        limit = row["limit"]
        cells.append(
            f"{limit['fraction']:.0%} ({_range(limit['gb_per_second'])} GB/s, "
            f"{_range(limit['gflop_per_second'])} GFLOP/s)"
        )
        yield "| " + " | ".join(cells) + " |"


def _rate(row: Mapping[str, Any]) -> str:
    """With the setting, where several were tried."""
    setting = f" ({row['setting']})" if len(row["tried"]) > 1 else ""
    return f"{row['tokens_per_second']}{setting}"


def _about(report: Mapping[str, Any]) -> Iterator[str]:
    for name, about in report["versions"].items():
        said = ", ".join(f"{key} {value}" for key, value in about.items())
        yield f"- {name}: {said}; ready after {report['ready_seconds'][name]} s"


def _range(values: Sequence[float]) -> str:
    low, high = round(min(values)), round(max(values))
    return str(low) if low == high else f"{low} to {high}"
