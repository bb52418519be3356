"""Arrivals against their definitions, computed slowly."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.workload.arrivals import Ramp, arrival_times, times_of_trace


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_all_at_once():
    assert arrival_times(5, math.inf, rng()).tolist() == [0.0] * 5
    assert arrival_times(0, 3.0, rng()).tolist() == []


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 7.0, math.inf])
@pytest.mark.parametrize(("num", "rate"), [(1, 5.0), (2000, 0.5), (2000, 40.0)])
def test_the_last_request_comes_after_num_by_rate(burstiness, num, rate):
    times = arrival_times(num, rate, rng(3), burstiness=burstiness)
    assert times[-1] == pytest.approx(num / rate)
    assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_variation_of_a_gamma_distribution(burstiness):
    gaps = np.diff(arrival_times(200_000, 10.0, rng(1), burstiness=burstiness))
    assert gaps.mean() == pytest.approx(0.1, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.02)


def test_fixed_gaps():
    assert arrival_times(4, 2.0, rng(), burstiness=math.inf).tolist() == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_goes_from_start_to_end(strategy):
    ramp = Ramp(strategy, 2.0, 32.0)
    rates = ramp.rates(5)
    expected = {"linear": [2, 9.5, 17, 24.5, 32], "exponential": [2, 4, 8, 16, 32]}
    assert rates == pytest.approx(expected[strategy])
    times = arrival_times(5, math.inf, rng(), burstiness=math.inf, ramp=ramp)
    assert times == pytest.approx(np.cumsum([1 / rate for rate in rates]))
    assert Ramp(strategy, 3.0, 9.0).rates(1).tolist() == [3.0]


def test_a_ramp_is_not_scaled():
    ramp = Ramp("linear", 10.0, 10.0)
    ends = {float(arrival_times(50, math.inf, rng(seed), ramp=ramp)[-1]) for seed in range(5)}
    assert len(ends) == 5


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_does_not_change_the_rate_of_a_ramp(burstiness):
    ramp = Ramp("linear", 10.0, 10.0)
    times = arrival_times(100_000, math.inf, rng(2), burstiness=burstiness, ramp=ramp)
    assert times[-1] == pytest.approx(10_000, rel=0.03)


def test_traces_begin_at_zero():
    assert times_of_trace([7.0, 3.0, 5.0]).tolist() == [0.0, 2.0, 4.0]
    assert times_of_trace([3.0, 7.0], speed=2.0).tolist() == [0.0, 2.0]
    assert times_of_trace([]).tolist() == []


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_no_rate(rate):
    with pytest.raises(ConfigError, match=f"--request-rate must be above 0.*{rate:g}"):
        arrival_times(3, rate, rng())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: arrival_times(3, 1.0, rng(), burstiness=0.0), "--burstiness must be above 0"),
        (lambda: Ramp("liner", 1, 2), "did you mean 'linear'"),
        (lambda: Ramp("linear", 0, 2), "--ramp-up-start-rps must be above 0 and finite, got 0"),
        (lambda: Ramp("linear", 1, math.inf), "--ramp-up-end-rps must be above 0.*got inf"),
        (lambda: times_of_trace([1.0, math.nan]), "finite"),
        (lambda: times_of_trace([1.0], speed=0), "speed of a trace must be above 0"),
    ],
)
def test_bad_numbers(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
