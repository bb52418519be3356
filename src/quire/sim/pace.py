"""How fast a machine was while a recording was made: what its steps took, by what a model of step
times says of them, window by window, and when it stood still.

A machine that others compute on is slow for seconds at a time, and near saturation such a spell is
a queue. Now and then it does nothing at all for a tenth of a second, which is the longest wait of
whoever came just then. A simulation that follows the recorded pace has the same spells. Knows no
scheduler.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from quire.sim.lockstep import Replayed
from quire.sim.step_time import StepTimeModel

WINDOW: Final = 1.0
"""Seconds over which steps are taken together: spells last longer, and one step says little."""
STALL: Final = 0.02
"""Seconds from which on the machine stood still: of a step beyond twice what is usual, of a pause
in an engine that had something to do, or of a request's way to an engine that had nothing to do."""


@dataclass(frozen=True, slots=True)
class MachinePace:
    """How many times as long as usual steps take, over time.

    Args:
        factors: Of each window of `WINDOW` seconds; the last also holds after it, the first before.
        stalls: When the machine began to stand still, and for how long; in order, apart.
    """

    factors: tuple[float, ...]
    stalls: tuple[tuple[float, float], ...] = ()

    def at(self, time: float) -> float:
        """Of a step that begins then."""
        window = int(time / WINDOW)
        return self.factors[max(0, min(window, len(self.factors) - 1))]

    def takes(self, start: float, usual: float) -> float:
        """Seconds of a step that begins then and usually takes so many."""
        end = start + self.at(start) * usual
        first = bisect.bisect_left(self.stalls, start, key=lambda stall: stall[0] + stall[1])
        for begin, seconds in self.stalls[first:]:
            if begin >= end:
                break
            end += min(seconds, begin + seconds - start)
        return end - start


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
    stalls: list[tuple[float, float]] = []
    ended = -math.inf
    waits_since: float | None = None
    for step in steps:
        if not step.shape.tokens:
            continue
        begin, seconds = step.recorded.start - start, step.recorded.seconds
        usual = times.seconds(step.shape)
        if waits_since is None and step.sent is not None:
            waits_since = max(ended, step.sent - start)
        if waits_since is not None and begin - waits_since > STALL:
            stalls.append((waits_since, begin - waits_since))
        if seconds - 2 * usual > STALL:
            stalls.append((begin, seconds - usual))
            seconds = usual
        ended = begin + step.recorded.seconds
        waits_since = ended if step.is_busy else None
        window = max(0, int(begin / WINDOW))
        more = window + 1 - len(taken)
        taken += [0.0] * more
        said += [0.0] * more
        taken[window] += seconds
        said[window] += usual
    # A window without steps is as fast as all were.
    factor = sum(taken) / sum(said) if any(said) else 1.0
    factors = (a / b if b else factor for a, b in zip(taken, said, strict=True))
    return MachinePace(tuple(factors) or (factor,), tuple(stalls))
