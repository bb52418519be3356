"""The roofs that benchmarks measure against. That no kernel is above them is checked where both are
measured, by `benchmarks/cpu_kernels.py`."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from kernel_kit import needs_native
from quire.kernels import probe
from quire.kernels.probe import Probe, Rates

pytestmark = needs_native


class Lib:
    """Kernels that take a known time on a clock of their own, but now and then are held up."""

    def __init__(self) -> None:
        self.now, self.calls, self.read_at = 0.0, 0, []

    def perf_counter(self) -> float:
        return self.now

    def _take(self, seconds: float) -> None:
        self.calls += 1
        self.now += seconds * (10 if self.calls % 4 == 0 else 1)

    def probe_read(self, address: int, size: int) -> float:
        self.read_at.append((address, size))
        self._take(size / 20e9)
        return 0.0

    def probe_multiply(self, rounds: int) -> float:
        self._take(rounds * 1e6 / 500e9)
        return rounds * 1e6

    def probe_multiply_codes(self, rounds: int, bits: int, groups: bool) -> float:
        rates = {8: (900e9, 600e9), 4: (1800e9, 900e9)}
        self._take(rounds * 4e6 / rates[bits][groups])
        return rounds * 4e6


def test_rates_are_work_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = Lib()
    monkeypatch.setattr(probe, "lib", lib)
    monkeypatch.setattr(probe, "time", lib)
    made = Probe()
    rates = made.measure(0.5)
    assert rates.read == pytest.approx(20e9) and rates.multiply == pytest.approx(500e9)
    assert rates.multiply_codes8 == pytest.approx(900e9)
    assert rates.multiply_codes4 == pytest.approx(1800e9)
    # 64 operations for each group of 32: what they take longer is the scaling.
    assert rates.seconds_per_group(8) == pytest.approx(64 / 600e9 - 64 / 900e9)
    assert rates.seconds_per_group(4) == pytest.approx(64 / 900e9 - 64 / 1800e9)
    [(address, size)] = set(lib.read_at)
    assert address % 64 == 0 and size == 1 << 28, "more than caches hold"


def test_the_real_ones_give_numbers() -> None:
    rates = Probe().measure(0.02)
    assert min(astuple(rates)) > 1e6


def test_the_mean_of_two() -> None:
    mean = Rates(1.0, 10.0, 5.0, 8.0, 4.0, 2.0).mean(Rates(3.0, 30.0, 7.0, 8.0, 4.0, 3.0))
    assert mean == Rates(2.0, 20.0, 6.0, 8.0, 4.0, 2.5)


def test_scaling_takes_no_time_below_zero() -> None:
    assert Rates(1.0, 1.0, 5.0, 8.0, 5.5, 8.0).seconds_per_group(8) == 0
