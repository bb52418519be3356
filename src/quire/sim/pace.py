"""How fast a machine is over time: how many times as long as usual steps and the pauses between
them take, and when it stands still.

A machine that others compute on is slow for seconds at a time, and near saturation such a spell is
a queue. Now and then it does nothing at all for a tenth of a second, which is the longest wait of
whoever came just then. Knows no scheduler, and not where the figures are from.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Final

from quire.sim.step_time import StepTimeModel

WINDOW: Final = 1.0
"""Seconds that are equally fast."""


@dataclass(frozen=True, slots=True)
class MachinePace:
    """How many times as long as usual steps take, over time.

    Args:
        decodes: Of steps without prompts, in each window of `WINDOW` seconds; the last also holds
            after it, the first before.
        prompts: Of steps with prompts. A machine whose memory is slow need not be slow in
            computing, nor the other way round.
        stalls: When the machine began to stand still, and for how long; in order, apart.
        repeats: After the last window comes the first one again. Stalls do not come again.
    """

    decodes: tuple[float, ...]
    prompts: tuple[float, ...]
    stalls: tuple[tuple[float, float], ...] = ()
    repeats: bool = False

    def at(self, time: float, prefills: int = 0) -> float:
        """Of a step that begins then, with so many prompts."""
        factors = self.prompts if prefills else self.decodes
        window = max(0, int(time / WINDOW))
        return factors[window % len(factors) if self.repeats else min(window, len(factors) - 1)]

    def takes(self, start: float, usual: float, prefills: int = 0) -> float:
        """Seconds of a step or pause that begins then, with so many prompts, and usually takes
        `usual`."""
        end = start + self.at(start, prefills) * usual
        first = bisect.bisect_left(self.stalls, start, key=lambda stall: stall[0] + stall[1])
        for begin, seconds in self.stalls[first:]:
            if begin >= end:
                break
            end += min(seconds, begin + seconds - start)
        return end - start


def calibrated_pace(times: StepTimeModel) -> MachinePace | None:
    """The pace of the machine while step times were measured, over and over; `None`: not known."""
    if not times.spells:
        return None
    decodes, prompts = zip(*times.spells, strict=True)
    return MachinePace(decodes, prompts, repeats=True)
