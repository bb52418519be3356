"""How fast a machine was while a recording was made: what its steps took, by what a model of step
times says of them, window by window, and when it stood still.

A simulation that follows the pace of a recording has the same slow spells. One that follows that of
a calibration has spells that are as long and as slow, at other times. Knows no scheduler.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from quire.sim.lockstep import Replayed
from quire.sim.pace import WINDOW, MachinePace
from quire.sim.step_time import StepTimeModel, kind_of

STALL: Final = 0.02
"""Seconds from which on the machine stood still: of a step beyond twice what is usual, of a pause
in an engine that had something to do, or of a request's way to an engine that had nothing to do."""
LITTLE: Final = 0.1
"""Seconds: a window of a calibration in which steps should have taken less says nothing."""
FEW: Final = 5
"""So many steps say half of how fast the machine was, and half of what was special to them."""


def measured_pace(
    steps: Iterable[Replayed], times: StepTimeModel, start: float = 0.0
) -> MachinePace:
    """The pace of recorded steps.

    Args:
        steps: In the order in which they ran.
        times: What is usual. Its own errors count as pace, so fit it to more than these steps.
        start: Of the recording's clock, what is to be 0.
    """
    spent: tuple[dict[int, _Spent], dict[int, _Spent]] = ({}, {})
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
        if _without_stall(seconds, usual) < seconds:
            stalls.append((begin, seconds - usual))
            seconds = usual
        ended = begin + step.recorded.seconds
        waits_since = ended if step.is_busy else None
        windows = spent[min(step.shape.prefills, 1)]
        windows.setdefault(max(0, int(begin / WINDOW)), _Spent()).add(seconds, usual)
    decodes, prompts = map(_factors, spent)
    return MachinePace(decodes, prompts, tuple(stalls))


def _without_stall(seconds: float, usual: float) -> float:
    """What a step took, or usually takes if the machine stood still in it."""
    return usual if seconds - 2 * usual > STALL else seconds


def measured_spells(
    steps: Sequence[Replayed], times: StepTimeModel
) -> dict[int, tuple[float, float]]:
    """`StepTimeModel.spells` of the steps that a model was fitted to, by their windows' numbers.

    What the model says too much or too little of all steps of a kind is no pace: kinds come and go
    in a calibration. Nor is a step in which the machine stood still.

    Args:
        steps: In the order in which they ran; seconds with few of them are left out.
        times: Fitted to them.
    """
    ratios = _ratios_of_kinds(steps, times)
    windows: dict[int, tuple[_Spent, _Spent]] = {}
    for step in steps:
        expected = times.seconds(step.shape) * ratios[kind_of(step.shape)]
        taken = _without_stall(step.recorded.seconds, expected)
        window = windows.setdefault(int(step.recorded.start / WINDOW), (_Spent(), _Spent()))
        window[min(step.shape.prefills, 1)].add(taken, expected)
    full = {n: pair for n, pair in sorted(windows.items()) if sum(s.usual for s in pair) >= LITTLE}
    decodes, prompts = (_spells([pair[sort] for pair in full.values()]) for sort in (0, 1))
    return dict(zip(full, zip(decodes, prompts, strict=True), strict=True))


def _spells(windows: Sequence[_Spent]) -> list[float]:
    """How many times as long as usual steps took in each, 1 on average."""
    found = [1 + (each.factor - 1) * each.steps / (each.steps + FEW) for each in windows]
    usual = sum(each.usual for each in windows)
    taken = sum(a * each.usual for a, each in zip(found, windows, strict=True))
    mean = taken / usual if usual else 1.0
    return [round(each / mean, 4) for each in found]


def _ratios_of_kinds(
    steps: Iterable[Replayed], times: StepTimeModel
) -> dict[tuple[int, ...], float]:
    """How many times as long as the model says steps of each kind took."""
    kinds: dict[tuple[int, ...], _Spent] = defaultdict(_Spent)
    for step in steps:
        expected = times.seconds(step.shape)
        taken = _without_stall(step.recorded.seconds, expected)
        kinds[kind_of(step.shape)].add(taken, expected)
    return {kind: spent.factor for kind, spent in kinds.items()}


class _Spent:
    """In steps of a sort."""

    def __init__(self) -> None:
        self.taken = self.usual = 0.0
        self.steps = 0

    def add(self, taken: float, usual: float) -> None:
        """One more."""
        self.taken += taken
        self.usual += usual
        self.steps += 1

    @property
    def factor(self) -> float:
        """How many times as long as usual they took; 1 if there were none."""
        return self.taken / self.usual if self.usual else 1.0


def _factors(windows: dict[int, _Spent]) -> tuple[float, ...]:
    """Of each window from 0 on; one without steps is as fast as all were."""
    whole = _Spent()
    for each in windows.values():
        whole.add(each.taken, each.usual)
    none = whole.factor
    count = max(windows, default=0) + 1
    return tuple(windows[i].factor if i in windows else none for i in range(count))
