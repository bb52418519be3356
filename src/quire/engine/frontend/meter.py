"""A party's meter, and its HTTP requests at the door. `metering.py` counts; knows no engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final


def _no_charge(num_tokens: int) -> None:
    """Nobody wants to know."""


class Meter:
    """What one party uses.

    Args:
        name: Of the party, as others may know it.
        charge: Called with the tokens that were used, at most once per request and step.
    """

    def __init__(self, name: str, charge: Callable[[int], None] = _no_charge) -> None:
        self.name: Final = name
        self.charge: Final = charge
        self.share: float | None = None
        """How much of the queue it may take; `None`: all."""
        self.num_entering = 0
        """Admitted HTTP requests of which the engine has nothing yet."""
        self.num_unfinished = 0
        """Completions with the engine."""
        self.num_waiting = 0
        """Of these, those without output."""
        self.waiting_tokens = self.waiting_bytes = 0
        """Of their prompts, as `QueueLimits` counts them."""
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        """Used so far. The cached ones are a part of those of prompts."""


class Entry:
    """An HTTP request at the door. Until its first prompt is with the engine it counts as one that
    waits, or any number could come in while texts are tokenised."""

    __slots__ = ("_is_open", "meter")

    def __init__(self, meter: Meter) -> None:
        self.meter: Final = meter
        self._is_open = True
        meter.num_entering += 1

    @property
    def is_open(self) -> bool:
        """Whether it counts."""
        return self._is_open

    def close(self) -> None:
        """It is with the engine, or will not be. May be called again."""
        if self._is_open:
            self._is_open = False
            self.meter.num_entering -= 1
