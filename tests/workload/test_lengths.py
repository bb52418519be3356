"""Distributions of lengths."""

from __future__ import annotations

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.workload.lengths import LogNormalLength, ObservedLength, UniformLength, parse_lengths


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_a_range_is_rounded_outwards():
    # 1024 * 0.3 = 307.2, so 716.8 and 1331.2
    assert UniformLength.around(1024, 0.3) == UniformLength(716, 1332)
    assert UniformLength.around(128, 0.0) == UniformLength(128, 128)
    assert UniformLength.around(1, 0.9, least=1) == UniformLength(1, 2)
    drawn = UniformLength(3, 6).sample(4000, rng())
    assert sorted(set(drawn.tolist())) == [3, 4, 5, 6]


def test_a_log_normal_has_its_median_and_limits():
    drawn = LogNormalLength(200, 1.0, 10, 2000).sample(40_000, rng())
    assert np.median(drawn) == pytest.approx(200, rel=0.03)
    assert drawn.min() == 10
    assert drawn.max() == 2000


def test_observed_lengths_are_drawn_again():
    assert set(ObservedLength([4, 9]).sample(50, rng()).tolist()) == {4, 9}


def test_lengths_as_text():
    assert parse_lengths("128") == UniformLength(128, 128)
    assert parse_lengths("uniform:2:8") == UniformLength(2, 8)
    assert parse_lengths("lognormal:100:0.5") == LogNormalLength(100, 0.5)
    assert parse_lengths("lognormal:100:0.5:4:900") == LogNormalLength(100, 0.5, 4, 900)


@pytest.mark.parametrize("text", ["", "x", "1.5", "uniform:2", "normal:1:2", "lognormal:1:2:3:4:5"])
def test_text_that_is_no_length(text):
    with pytest.raises(ConfigError, match="a length is a number of tokens.*got"):
        parse_lengths(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: UniformLength(5, 4),
        lambda: UniformLength(-1, 4),
        lambda: LogNormalLength(0, 1),
        lambda: LogNormalLength(5, -1),
        lambda: ObservedLength([]),
        lambda: UniformLength.around(10, 1.0),
        lambda: UniformLength.around(0, 0, least=1),
    ],
)
def test_lengths_out_of_range(make):
    with pytest.raises(ConfigError):
        make()
