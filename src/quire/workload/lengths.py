"""How long prompts and outputs are: distributions over whole numbers of tokens.

Each gives any number of lengths from a random generator; `parse_lengths` reads one from text.
Knows nothing of tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError

Lengths = NDArray[np.int64]
LONGEST: Final = 2**31 - 1
"""Tokens that a length may have."""


class LengthDistribution(Protocol):
    """Gives lengths."""

    def sample(self, num: int, rng: np.random.Generator) -> Lengths:
        """`num` lengths in tokens."""
        ...


@dataclass(frozen=True, slots=True)
class UniformLength:
    """Every length from `low` to `high`, both included, is as likely; a fixed length if they are
    equal.

    Raises:
        ConfigError: `low` is negative or above `high`.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= LONGEST:
            raise ConfigError(
                f"lengths must be from 0 to {LONGEST} and ascending, got {self.low} to {self.high}"
            )

    @classmethod
    def around(cls, length: int, range_ratio: float, least: int = 0) -> UniformLength:
        """From `length * (1 - range_ratio)`, rounded down, to `length * (1 + range_ratio)`, rounded
        up, but at least `least`: the random dataset of `vllm bench serve`.

        Raises:
            ConfigError: the length is below `least`, or the ratio is not in [0, 1).
        """
        if length < least:
            raise ConfigError(f"a length must be at least {least} tokens, got {length}")
        if not 0 <= range_ratio < 1:
            raise ConfigError(f"--random-range-ratio must be in [0, 1), got {range_ratio:g}")
        low = math.floor(length * (1 - range_ratio))
        return cls(max(low, least), max(math.ceil(length * (1 + range_ratio)), least))

    def sample(self, num: int, rng: np.random.Generator) -> Lengths:
        """`num` lengths in tokens."""
        return rng.integers(self.low, self.high + 1, size=num)


@dataclass(frozen=True, slots=True)
class LogNormalLength:
    """The usual shape of what people write: many short ones and a long tail.

    Args:
        median: Half are shorter, in tokens.
        sigma: Standard deviation of the logarithm.
        low: Shorter ones are raised to this.
        high: Longer ones are cut to this.

    Raises:
        ConfigError: the median is not above 0, sigma is negative, or the limits do not ascend.
    """

    median: float
    sigma: float
    low: int = 1
    high: int = LONGEST

    def __post_init__(self) -> None:
        if not (0 < self.median < math.inf and 0 <= self.sigma < math.inf):
            raise ConfigError(
                "a log-normal length needs a median above 0 and a sigma of at least 0, got "
                f"{self.median:g} and {self.sigma:g}"
            )
        UniformLength(self.low, self.high)  # the limits have the same rule

    def sample(self, num: int, rng: np.random.Generator) -> Lengths:
        """`num` lengths in tokens."""
        drawn = rng.lognormal(math.log(self.median), self.sigma, num)
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64)


@dataclass(frozen=True, slots=True)
class ObservedLength:
    """Lengths that were seen, each as likely.

    Raises:
        ConfigError: there are none.
    """

    seen: Sequence[int]

    def __post_init__(self) -> None:
        if not len(self.seen):
            raise ConfigError("observed lengths: there are none to choose from")

    def sample(self, num: int, rng: np.random.Generator) -> Lengths:
        """`num` lengths in tokens."""
        return rng.choice(np.asarray(self.seen, dtype=np.int64), num)


def _fixed(length: str) -> UniformLength:
    return UniformLength(int(length), int(length))


def _uniform(low: str, high: str) -> UniformLength:
    return UniformLength(int(low), int(high))


def _lognormal(
    median: str, sigma: str, low: str = "1", high: str = str(LONGEST)
) -> LogNormalLength:
    return LogNormalLength(float(median), float(sigma), int(low), int(high))


SHAPES: Final[dict[str, Callable[..., LengthDistribution]]] = {
    "fixed": _fixed,
    "uniform": _uniform,
    "lognormal": _lognormal,
}
"""What may stand before the first colon of `parse_lengths`."""


def parse_lengths(text: str) -> LengthDistribution:
    """Read `128`, `fixed:128`, `uniform:64:256` or `lognormal:MEDIAN:SIGMA[:LOW:HIGH]`.

    Raises:
        ConfigError: it is none of these, or a number is out of range.
    """
    name, *numbers = text.split(":") if ":" in text else ("fixed", text)
    try:
        return SHAPES[name](*numbers)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            "a length is a number of tokens, uniform:LOW:HIGH or "
            f"lognormal:MEDIAN:SIGMA[:LOW:HIGH], got {text!r}"
        ) from None
