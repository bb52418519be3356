"""The result of `quire bench engine` as a Markdown table, with what it compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.bench.engine.options import PEERS


def engine_text(report: Mapping[str, Any]) -> str:
    """Engines, rates and ratios, how near quire is to the limit on paper, and each engine's build
    and settings."""
    return "\n".join([*_table(report), "", *_about(report)])


def _table(report: Mapping[str, Any]) -> Iterator[str]:
    machine, results = report["machine"], report["results"]
    yield (
        f"{report['model']}, quire {report['version']}, {machine['cores']} cores of "
        f"{machine['cpu']}; tokens per second, medians of {report['rounds']} rounds in turns. Of "
        "quire: share of the limit on paper, and how many times as fast as its first row; of a "
        "peer: how many times as fast quire is with weights of that kind."
    )
    yield ""
    yield "| engine | " + " | ".join(results) + " |"
    yield "|---" + "|---:" * len(results) + "|"
    for name in next(iter(results.values())):
        peer, form = name.split(" ")
        cells = [f"{PEERS.get(peer, peer)} {form}"]
        for case, row in results.items():
            cells.append(_cell(row[name], report["ratios"][case].get(name)))
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield _rates([rows[name]["limit"] for rows in results.values() for name in rows
                  if "limit" in rows[name]])  # fmt: skip


def _cell(row: Mapping[str, Any], ratio: float | None) -> str:
    """With the setting, where several were tried."""
    said = [row["setting"]] if len(row["tried"]) > 1 else []
    if "limit" in row:
        said.append(f"{row['limit']['fraction']:.0%} of limit")
    if ratio is not None:
        said.append(f"{ratio:.2f} x")
    return f"{row['tokens_per_second']}" + (f" ({', '.join(said)})" if said else "")


def _rates(limits: Sequence[Mapping[str, Any]]) -> str:
    """What the limits on paper were reckoned with."""
    memory, floats, codes8, codes4, groups8, groups4 = (
        _range([value for one in limits for value in one[key]])
        for key in (
            "gb_per_second", "gflop_per_second", "gop_per_second_of_codes8",
            "gop_per_second_of_codes4", "gop_per_second_of_groups8", "gop_per_second_of_groups4",
        )
    )  # fmt: skip
    return (
        f"The machine meanwhile: {memory} GB/s of memory, {floats} GFLOP/s in bf16, {codes8} Gop/s "
        f"in codes of 8 bits, {codes4} in codes of 4, {groups8} and {groups4} in groups of 32 that "
        "are scaled."
    )


def _about(report: Mapping[str, Any]) -> Iterator[str]:
    for name, about in report["versions"].items():
        said = ", ".join(f"{key} {value}" for key, value in about.items() if key != "work")
        yield f"- {name}: {said}; ready after {report['ready_seconds'][name]} s"


def _range(values: Sequence[float]) -> str:
    low, high = round(min(values)), round(max(values))
    return str(low) if low == high else f"{low} to {high}"
