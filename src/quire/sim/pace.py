"""How fast a machine was while a recording was made: what its steps took, by what a model of step
times says of them, window by window, and when it stood still.

A machine that others compute on is slow for seconds at a time, and near saturation such a spell is
a queue. Now and then it does nothing at all for a tenth of a second, which is the longest wait of
whoever came just then. A simulation that follows the recorded pace has the same spells. One that
follows the pace of a calibration has spells that are as long and as slow, at other times. Knows no
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
        decodes: Of steps without prompts, in each window of `WINDOW` seconds; the last also holds
            after it, the first before.
        prompts: Of steps with prompts. A machine whose memory is slow need not be slow in
            computing, nor the other way round.
        stalls: When the machine began to stand still, and for how long; in order, apart.
    """

    decodes: tuple[float, ...]
    prompts: tuple[float, ...]
    stalls: tuple[tuple[float, float], ...] = ()

    def at(self, time: float, prefills: int = 0) -> float:
        """Of a step that begins then, with so many prompts."""
        factors = self.prompts if prefills else self.decodes
        return factors[max(0, min(int(time / WINDOW), len(factors) - 1))]

    def takes(self, start: float, usual: float, prefills: int = 0) -> float:
        """Seconds of a step that begins then, with so many prompts, and usually takes `usual`."""
        end = start + self.at(start, prefills) * usual
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
    spent = (_Spent(), _Spent())
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
        spent[min(step.shape.prefills, 1)].add(max(0, int(begin / WINDOW)), seconds, usual)
    decodes, prompts = (each.factors() for each in spent)
    return MachinePace(decodes, prompts, tuple(stalls))


class _Spent:
    """In the steps of a kind, by window."""

    def __init__(self) -> None:
        self._taken: list[float] = []
        self._usual: list[float] = []

    def add(self, window: int, taken: float, usual: float) -> None:
        more = window + 1 - len(self._taken)
        self._taken += [0.0] * more
        self._usual += [0.0] * more
        self._taken[window] += taken
        self._usual[window] += usual

    def factors(self) -> tuple[float, ...]:
        """A window without such steps is as fast as all were."""
        usual = sum(self._usual)
        overall = sum(self._taken) / usual if usual else 1.0
        pairs = zip(self._taken, self._usual, strict=True)
        return tuple(a / b if b else overall for a, b in pairs) or (overall,)
