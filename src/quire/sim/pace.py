"""How fast a machine was while a recording was made: what its steps took, by what a model of step
times says of them, window by window.

A machine that others compute on is slow for seconds at a time, and near saturation such a spell is
a queue. A simulation that follows the recorded pace has the same spells. Knows no scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from quire.sim.lockstep import Replayed
from quire.sim.step_time import StepTimeModel

WINDOW: Final = 1.0
"""Seconds over which steps are taken together: spells last longer, and one step says little."""


@dataclass(frozen=True, slots=True)
class MachinePace:
    """How many times as long as usual steps take, over time.

    Args:
        factors: Of each window of `WINDOW` seconds; the last also holds after it, the first before.
    """

    factors: tuple[float, ...]

    def at(self, time: float) -> float:
        """Of a step that begins then."""
        window = int(time / WINDOW)
        return self.factors[max(0, min(window, len(self.factors) - 1))]


def measured_pace(
    steps: Iterable[Replayed], times: StepTimeModel, start: float = 0.0
) -> MachinePace:
    """The pace of recorded steps.

    Args:
        steps: In the order in which they ran.
        times: What is usual. Its own errors count as pace, so fit it to more than these steps.
        start: Of the recording's clock, what is to be 0.
    """
    taken: list[float] = []
    said: list[float] = []
    for step in steps:
        if not step.shape.tokens:
            continue
        window = max(0, int((step.recorded.start - start) / WINDOW))
        more = window + 1 - len(taken)
        taken += [0.0] * more
        said += [0.0] * more
        taken[window] += step.recorded.seconds
        said[window] += times.seconds(step.shape)
    # A window without steps is as fast as all were.
    usual = sum(taken) / sum(said) if any(said) else 1.0
    return MachinePace(
        tuple(a / b if b else usual for a, b in zip(taken, said, strict=True)) or (usual,)
    )
