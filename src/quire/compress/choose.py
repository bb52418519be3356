"""Which choice each layer gets, under a divergence or under a size. Plain numbers.

The divergence of a model is taken for the sum of those of its layers, each measured with all
others as they were. That is an estimate: whoever asks measures the whole, and asks again with
another budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Option:
    """One way to keep a layer."""

    nbytes: int
    kld: float
    """Mean divergence in nats of the model in which this layer alone is kept so."""
    read: int | None = None
    """Bytes that a token reads of it, if not all of them."""

    @property
    def bytes_read(self) -> int:
        """Bytes that a token reads of it."""
        return self.nbytes if self.read is None else self.read


Options = Mapping[str, Mapping[str, Option]]
"""By layer, then by the option's name."""


def smallest(options: Options, budget: float) -> dict[str, str]:
    """The choice with few bytes to read whose divergences sum up to `budget` at most.

    From the smallest option of every layer, the step that lowers the divergence most for its
    bytes is taken until the sum fits.

    Raises:
        ConfigError: not even the best options fit.
    """
    chosen = {name: _smallest(of) for name, of in options.items()}
    total = _kld(options, chosen)
    while total > budget:
        steps = [
            ((now.kld - then.kld) / max(1, then.bytes_read - now.bytes_read), name, other)
            for name, of in options.items()
            for now in (of[chosen[name]],)
            for other, then in of.items()
            if then.kld < now.kld
        ]
        if not steps:
            raise ConfigError(
                f"--budget-kld {budget:g} cannot be kept: the best choice has {total:.6f} nats"
            )
        _, name, other = max(steps)
        chosen[name] = other
        total = _kld(options, chosen)
    return chosen


def nearest(options: Options, memory: int) -> dict[str, str]:
    """The choice of little divergence whose bytes are `memory` at most.

    Raises:
        ConfigError: not even the smallest options fit.
    """
    chosen = {name: _nearest(of) for name, of in options.items()}
    total = _bytes(options, chosen)
    while total > memory:
        steps = [
            ((then.kld - now.kld) / (now.nbytes - then.nbytes), name, other)
            for name, of in options.items()
            for now in (of[chosen[name]],)
            for other, then in of.items()
            if then.nbytes < now.nbytes
        ]
        if not steps:
            raise too_little(total, memory)
        _, name, other = min(steps)
        chosen[name] = other
        total = _bytes(options, chosen)
    return chosen


def too_little(least: int, memory: int) -> ConfigError:
    """What to raise if layers that take `least` bytes or more have room for `memory` only."""
    return ConfigError(
        f"--memory: the layers take at least {least:,} bytes, and there is room for "
        f"{max(0, memory):,} beside what is not quantised: allow more"
    )


def _smallest(of: Mapping[str, Option]) -> str:
    return min(of, key=lambda name: (of[name].bytes_read, of[name].kld))


def _nearest(of: Mapping[str, Option]) -> str:
    return min(of, key=lambda name: (of[name].kld, of[name].nbytes))


def _kld(options: Options, chosen: Mapping[str, str]) -> float:
    return sum(options[name][choice].kld for name, choice in chosen.items())


def _bytes(options: Options, chosen: Mapping[str, str]) -> int:
    return sum(options[name][choice].nbytes for name, choice in chosen.items())
