"""When requests come: at once, at a rate (Poisson or burstier), along a ramp, or as a trace tells.

All functions give seconds since the beginning, ascending. Rates, burstiness and ramps are defined
as in `vllm bench serve`: gaps are gamma-distributed, and at a constant rate they are scaled so that
the last of N requests comes after exactly N / rate seconds. Knows nothing of what is asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.spelling import did_you_mean

AT_ONCE: Final = math.inf
"""The rate at which all requests come at once."""
RAMPS: Final = ("linear", "exponential")
Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that changes from the first request to the last.

    Args:
        strategy: `linear` or `exponential`: how the rate grows with the number of requests sent.
        start: Requests per second at the first request.
        end: Requests per second at the last one.

    Raises:
        ConfigError: the strategy is unknown, or a rate is not above 0.
    """

    strategy: str
    start: float
    end: float

    def __post_init__(self) -> None:
        if self.strategy not in RAMPS:
            raise ConfigError(
                f"--ramp-up-strategy must be one of {', '.join(RAMPS)}, got {self.strategy!r}"
                f"{did_you_mean(self.strategy, RAMPS)}"
            )
        for name, rate in (("start", self.start), ("end", self.end)):
            if not (0 < rate < math.inf):
                raise ConfigError(f"--ramp-up-{name}-rps must be above 0 and finite, got {rate:g}")

    def rates(self, num: int) -> Times:
        """The rate at each of `num` requests."""
        progress = np.arange(num) / max(num - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return np.asarray(self.start * (self.end / self.start) ** progress)


def arrival_times(
    num: int,
    rate: float,
    rng: np.random.Generator,
    *,
    burstiness: float = 1.0,
    ramp: Ramp | None = None,
) -> Times:
    """Arrival times of `num` requests.

    Args:
        num: How many.
        rate: Requests per second; `inf`: all come at 0.
        rng: Where randomness comes from.
        burstiness: Shape of the gamma distribution of gaps. 1 is a Poisson process, less is
            burstier, more is more regular, `inf` is a fixed gap.
        ramp: Used instead of `rate`. Times are then not scaled.

    Raises:
        ConfigError: a rate or the burstiness is not above 0.
    """
    check_rate(rate)
    if not burstiness > 0:
        raise ConfigError(f"--burstiness must be above 0, got {burstiness:g}")
    if num == 0 or (ramp is None and math.isinf(rate)):
        return np.zeros(num)
    rates = np.full(num, rate) if ramp is None else ramp.rates(num)
    times = np.cumsum(_gaps(rates, burstiness, rng))
    if ramp is None and times[-1] > 0:
        times *= num / rate / times[-1]
    return times


def times_of_trace(times: Sequence[float], speed: float = 1.0) -> Times:
    """Arrivals that were observed, from the first one on.

    Args:
        times: Seconds, in any order.
        speed: 2 plays them twice as fast.

    Raises:
        ConfigError: a time is not finite, or the speed is not above 0.
    """
    if not (0 < speed < math.inf):
        raise ConfigError(f"the speed of a trace must be above 0 and finite, got {speed:g}")
    found = np.sort(np.asarray(times, dtype=np.float64))
    if not np.isfinite(found).all():
        raise ConfigError("the arrivals of a trace must be finite numbers of seconds")
    return (found - found[0]) / speed if len(found) else found


def check_rate(rate: float) -> None:
    """Raises ConfigError if this is no rate of requests."""
    if not rate > 0:
        raise ConfigError(
            f"--request-rate must be above 0 requests per second (inf: all at once), got {rate:g}"
        )


def _gaps(rates: Times, burstiness: float, rng: np.random.Generator) -> Times:
    if math.isinf(burstiness):
        return 1 / rates
    return rng.gamma(burstiness, 1 / (rates * burstiness))
