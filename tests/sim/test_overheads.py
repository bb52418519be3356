"""What a calibration makes of an engine in its own process: pauses, and steps that take longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.calibration import Served
from quire.sim.lockstep import measured_overheads
from quire.sim.step_time import KNOTS, Overheads, StepShape, StepTimeModel


def steps(pauses: list[tuple[int, float]], busy: bool = True) -> tuple[list[Any], list[Any]]:
    """Steps of 10 ms with so many rows, each followed by a pause."""
    recorded, replayed, now = [], [], 0.0
    for rows, pause in [*pauses, (1, 0.0)]:
        recorded.append(SimpleNamespace(start=now, seconds=0.01))
        replayed.append(SimpleNamespace(shape=StepShape(rows, rows, 0, 0, 0), is_busy=busy))
        now += 0.01 + pause
    return recorded, replayed


def test_pauses_grow_with_the_requests() -> None:
    found = measured_overheads(*steps([(rows, 1e-4 + rows * 1e-5) for rows in (1, 2, 4, 8) * 5]))
    assert found.gap == pytest.approx(1e-4)
    assert found.gap_per_row == pytest.approx(1e-5)


@pytest.mark.parametrize("rows", [(4, 4, 4), (1, 4, 16)])
def test_more_requests_never_shorten_a_pause(rows: tuple[int, ...]) -> None:
    found = measured_overheads(*steps([(n, 1e-3 / n) for n in rows]))
    assert found.gap_per_row == 0.0
    assert found.gap == pytest.approx(sum(1e-3 / n for n in rows) / len(rows))


def test_pauses_without_work_do_not_count() -> None:
    assert measured_overheads(*steps([(1, 1.0)] * 3, busy=False)) == Overheads()


def test_decodes_and_prompts_count_alike() -> None:
    model = StepTimeModel(fixed=0.01, per_token=(0.0,) * (len(KNOTS) - 1))
    decode, prompt = StepShape(1, 1, 0, 9, 0), StepShape(64, 1, 1, 0, 64)
    shapes, times = [decode] * 90 + [prompt] * 10, [0.011] * 90 + [0.015] * 10
    assert Served(Overheads(), shapes, times).factor(model) == pytest.approx((1.1 + 1.5) / 2)
    assert Served(Overheads(), [decode], [0.02]).factor(model) == pytest.approx(2.0)
    assert Served(Overheads(), [], []).factor(model) == 1.0
