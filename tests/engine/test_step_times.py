"""Predictions of how long a step takes: from what was seen, and far beyond it."""

from __future__ import annotations

import random

import pytest

from quire.engine.cores.step_times import StepTimes


def truth(tokens: int, rows: int, attended: int) -> float:
    """Seconds on a machine of the test's own."""
    return 0.002 + 1e-4 * tokens + 5e-5 * rows + 4e-9 * attended


def decode(rows: int, context: int) -> tuple[int, int, int]:
    return rows, rows, rows * context


def prompt(tokens: int, before: int = 0) -> tuple[int, int, int]:
    return tokens, 1, tokens * (before + tokens)


def learned(*shapes: tuple[int, int, int], noise: float = 0.0) -> StepTimes:
    rng, times = random.Random(1), StepTimes()
    for shape in shapes:
        times.add(*shape, truth(*shape) * (1 + noise * rng.uniform(-1, 1)))
    return times


def mixed() -> list[tuple[int, int, int]]:
    prompts = [prompt(n, before) for n in (16, 100, 512, 2048) for before in (0, 500, 4000)]
    return [decode(rows, c) for rows in (1, 4, 32) for c in (64, 512, 4000)] * 50 + prompts


def test_before_any_step_nothing_is_predicted() -> None:
    assert StepTimes().predict(1, 1, 1) is None


@pytest.mark.parametrize("shape", [decode(16, 1000), prompt(1024), prompt(300, 3000)])
def test_what_lies_between_the_seen_is_predicted(shape: tuple[int, int, int]) -> None:
    expected = learned(*mixed(), noise=0.2).predict(*shape)
    assert expected is not None and truth(*shape) / 2 < expected < truth(*shape) * 2


@pytest.mark.parametrize(
    "seen",
    [
        [prompt(8), *(decode(1, 9 + k) for k in range(64))],
        [decode(rows, 50) for rows in (1, 2, 3, 8)],
        [prompt(64), prompt(200), decode(4, 300)],
        [prompt(1)],
    ],
)
@pytest.mark.parametrize("shape", [prompt(8192), prompt(32768), prompt(8192, 60000)])
def test_a_step_larger_than_all_before_is_never_thought_short(
    seen: list[tuple[int, int, int]], shape: tuple[int, int, int]
) -> None:
    """Five times the prediction is what it gets: less would kill a core that works."""
    expected = learned(*seen, noise=0.2).predict(*shape)
    assert expected is not None and 5 * expected > 2 * truth(*shape)


def test_a_small_step_is_not_thought_long_for_the_sake_of_large_ones() -> None:
    expected = learned(*mixed()).predict(*decode(1, 64))
    assert expected is not None and expected < 5 * truth(*decode(1, 64))


def test_a_cold_first_step_fades() -> None:
    times = StepTimes()
    times.add(*prompt(64), 30.0)
    for _ in range(100):
        times.add(*prompt(64), 0.01)
    expected = times.predict(*prompt(64))
    assert expected is not None and expected < 0.1


def test_one_step_in_which_the_machine_slept_changes_little() -> None:
    times = learned(*[decode(1, 100)] * 50)
    times.add(*decode(1, 100), 3600.0)
    expected = times.predict(*decode(1, 100))
    assert expected is not None and expected < 2 * truth(*decode(1, 100))


def test_the_model_follows_a_machine_that_becomes_slower() -> None:
    times = learned(*[decode(1, 100)] * 50)
    for _ in range(100):
        times.add(*decode(1, 100), 3 * truth(*decode(1, 100)))
    expected = times.predict(*decode(1, 100))
    assert expected is not None and expected > 2.5 * truth(*decode(1, 100))


def test_it_keeps_little_however_long_a_run_is() -> None:
    rng, times = random.Random(2), StepTimes()
    for _ in range(20000):
        tokens = rng.choice([1, rng.randrange(1, 300), rng.randrange(1, 10**5)])
        rows, context = rng.randrange(1, tokens + 1), rng.randrange(1, 10**5)
        times.add(tokens, rows, tokens * context, rng.random())
    assert len(times._kinds) < 17 * 18
    assert times.predict(1, 1, 1) is not None
