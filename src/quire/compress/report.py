"""What `quire quantize` tells: a JSON file, a page with a plot, and lines for the terminal.

The speed that is predicted is the bandwidth of this machine's memory over the bytes of weights that
a token needs: a limit for one request, not a measurement. Knows numbers alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from quire.utils.math import human_bytes

REPORT: Final = "quantisation_report.json"
PLOT: Final = "quantisation_report.html"
_PROBE: Final = 1 << 28
_ROUNDS: Final = 5


def read_bandwidth() -> float:
    """Bytes per second with which this machine reads memory, all cores, the best of some rounds."""
    memory = torch.ones(_PROBE // 4, dtype=torch.float32)
    best = 0.0
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        memory.sum()
        best = max(best, memory.nbytes / (time.perf_counter() - started))
    return best


def write_report(out: Path, report: Mapping[str, Any]) -> bool:
    """Write the files into a folder; gives whether there is a plot: plotly may be missing."""
    (out / REPORT).write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    try:
        page = plot(report)
    except ModuleNotFoundError:
        return False
    (out / PLOT).write_text(page, "utf-8")
    return True


def give_out(folder: Path) -> None:
    """Put the name of its folder into a report that was written with another.

    Raises:
        OSError: it cannot be written; it is as it was then.
    """
    report, beside = folder / REPORT, folder / f"{REPORT}.part"
    said = json.loads(report.read_text("utf-8")) | {"out": str(folder)}
    try:
        beside.write_text(json.dumps(said, indent=2) + "\n", "utf-8")
        beside.replace(report)
    finally:
        beside.unlink(missing_ok=True)


def plot(report: Mapping[str, Any]) -> str:
    """A page on its own with the divergence of each option of each layer, and what was chosen.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    import plotly.graph_objects as go

    layers = report["layers"]
    figure = go.Figure()
    names = [layer["name"] for layer in layers]
    for option in sorted({name for layer in layers for name in layer["kld"]}):
        values = [layer["kld"].get(option) for layer in layers]
        figure.add_bar(name=option, x=names, y=values)
    chosen = [layer["choice"] for layer in layers]
    top = [max([*layer["kld"].values(), 1e-9]) for layer in layers]
    figure.add_scatter(
        name="chosen", x=names, y=top, text=chosen, mode="text", textposition="top center"
    )
    held = report["held_out"]
    figure.update_layout(
        title=f"{report['model']}: KLD {held['kld']:.5f}, same top token "
        f"{100 * held['same_top']:.2f} %, {human_bytes(report['bytes'])} of "
        f"{human_bytes(report['bytes_before'])}",
        yaxis={"type": "log", "title": "KLD of the model with this layer alone, nats"},
        xaxis={"title": "layer"},
        barmode="group",
    )
    page: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return page


def as_text(report: Mapping[str, Any]) -> str:
    """The report for a reader."""
    held, chosen = report["held_out"], report["chosen_by"]
    counts: dict[str, int] = {}
    for layer in report["layers"]:
        how = f" ({layer['method']})" if layer["choice"] == "int4" and layer["method"] else ""
        counts[layer["choice"] + how] = counts.get(layer["choice"] + how, 0) + 1
    rows = [
        ("written to", report["out"]),
        ("layers", ", ".join(f"{count} {name}" for name, count in counts.items())),
        ("not quantised", ", ".join(f"{n} ({why})" for n, why in report["kept"].items())),
        ("head", "int8, apart from the embedding, which stays as it was" * report["head_apart"]),
        ("size", f"{human_bytes(report['bytes'])} of {human_bytes(report['bytes_before'])}"),
        ("KLD", f"{held['kld']:.6f} nats in the mean, {held['kld_p99']:.6f} at 99 %, on "
         f"{held['positions']:,} tokens held out ({chosen['kld']:.6f} on those it was chosen by)"),
        ("over the budget", _over_budget(report)),
        ("same top token", f"{100 * held['same_top']:.2f} %"),
        ("perplexity", f"{held['perplexity']:.4f}, before {held['reference_perplexity']:.4f}"),
        ("at most", f"{report['predicted_tokens_per_second']:.1f} tokens/s for one request, before "
         f"{report['predicted_before']:.1f}: {report['bandwidth'] / 1e9:.1f} GB/s of memory"),
        ("transformers", report["transformers"]),
        ("report", f"{REPORT}{f', {PLOT}' if report['plot'] else ''}"),
        ("", "" if report["plot"] else "for the plot: pip install 'quire[bench]'"),
    ]  # fmt: skip
    return "\n".join(f"{name:<16}{text}" for name, text in rows if text)


def _over_budget(report: Mapping[str, Any]) -> str:
    """What is to be done if the text held out has a greater divergence than was allowed."""
    if report["held_out_within_budget"]:
        return ""
    return (
        f"on the tokens held out the KLD is above --budget-kld {report['budget_kld']:g}, which is "
        "kept on the text for choices: give more calibration text, or text more like what the "
        "model will see, or a smaller budget"
    )
