"""`quire lab eager`: what `--enforce-eager` does to starts and to decoding."""

from __future__ import annotations

from typing import Any

from quire.bench.lab.kit import Effect, Lab, LabReport, figures_of, median, ms
from quire.bench.offline.startup import start_once

START_SECONDS = 600.0


def eager(lab: Lab) -> LabReport:
    """Start and decode with and without it."""
    variants: dict[str, dict[str, Any]] = {
        "compiled": {"enforce_eager": False},
        "eager": {"enforce_eager": True},
    }
    with lab.engines(variants) as engines:

        def measure(name: str, number: int) -> dict[str, float]:
            options = {**lab.options, **variants[name]}
            start = start_once(options, START_SECONDS)["startup_time"]
            return {**figures_of(lab.run(engines[name], [32] * 8, 64)), "start": start}

        found = lab.each_round("eager", list(variants), measure)
    start = Effect.of(found["compiled"]["start"], found["eager"]["start"])
    decode = Effect.of(found["eager"]["tpot"], found["compiled"]["tpot"])
    return LabReport(
        "eager",
        "What does `--enforce-eager` save at the start, and cost per token?",
        "A start in a new process; then 8 prompts of 32 tokens, 64 tokens out of each. On a CPU "
        "quire compiles nothing, so there is nothing to switch off.",
        ["", "start, s", "TPOT, ms"],
        [[name, f"{median(row['start']):.2f}", ms(row["tpot"])] for name, row in found.items()],
        f"{start.sentence('Without eager mode, a start', 'took', 'took only')}; "
        f"{decode.sentence('with it, the time per token', 'was', 'was only')}.",
        dict(found),
    )
