"""Which kernels prefill and decode spend their time in, side by side.

Runs a workload on an inline engine under torch's profiler, one recording for steps that compute
prompts and one for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

from quire.kernels.scopes import PREFIX


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation over a phase."""

    name: str
    calls: int
    seconds: float
    share: float
    """Of the phase's time, 0 to 1."""


def kernels(recorded: profile) -> list[Kernel]:
    """Our operations with what they call, and what runs outside of them; most time first."""
    rows: dict[str, tuple[int, float]] = {}
    for event in recorded.events() or []:
        parent = event.cpu_parent
        if _inside_ours(parent) or event.name.startswith("ProfilerStep"):
            continue
        ours = event.name.startswith(PREFIX)
        seconds = (event.cpu_time_total if ours else event.self_cpu_time_total) / 1e6
        calls, before = rows.get(event.name, (0, 0.0))
        rows[event.name] = (calls + 1, before + seconds)
    total = sum(seconds for _, seconds in rows.values()) or 1.0
    made = [Kernel(name, calls, s, s / total) for name, (calls, s) in rows.items()]
    return sorted(made, key=lambda kernel: -kernel.seconds)


def _inside_ours(event: Any) -> bool:
    while event is not None:
        if event.name.startswith(PREFIX):
            return True
        event = event.cpu_parent
    return False


class PhaseProfiler:
    """Records the steps of an engine by phase.

    Args:
        engine: An `LLMEngine`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.steps = {"prefill": 0, "decode": 0}

    def run(self, limit: int = 64) -> dict[str, list[Kernel]]:
        """Step until nothing is left; at most `limit` decode steps are recorded.

        Returns:
            The kernels of `prefill` and of `decode`.
        """
        found: dict[str, list[Kernel]] = {}
        for phase in ("prefill", "decode"):
            with profile(activities=[ProfilerActivity.CPU]) as recorded:
                while self._engine.core.scheduler.requests and self._is(phase):
                    if phase == "decode" and self.steps[phase] >= limit:
                        break
                    self._engine.step()
                    self.steps[phase] += 1
            found[phase] = kernels(recorded)
        while self._engine.has_unfinished_requests:
            self._engine.step()
        return found

    def _is(self, phase: str) -> bool:
        """Whether the next step belongs to a phase: it computes prompts while any is unfinished."""
        scheduler = self._engine.core.scheduler
        prompts = bool(scheduler.waiting) or any(
            r.num_computed_tokens < r.num_tokens - 1 for r in scheduler.running
        )
        return prompts == (phase == "prefill")


def side_by_side(found: Mapping[str, Sequence[Kernel]], top: int) -> list[tuple[str, ...]]:
    """Rows of a table: kernel, milliseconds, share and calls of prefill, then of decode."""
    rows = []
    for index in range(top):
        row: list[str] = []
        for phase in ("prefill", "decode"):
            ranked = found[phase]
            if index < len(ranked):
                k = ranked[index]
                row += [k.name, f"{1000 * k.seconds:.2f}", f"{100 * k.share:.1f} %", str(k.calls)]
            else:
                row += [""] * 4
        if any(row):
            rows.append(tuple(row))
    return rows
