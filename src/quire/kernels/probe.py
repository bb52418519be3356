"""What this machine can do: how fast it reads memory and multiplies, the roofs of every kernel.

A step of a model cannot be faster than reading its weights once, nor than two operations per weight
and token. Measures both rates with the instruction set and the threads that the kernels use. Knows
no model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Final

import numpy as np

from quire.kernels.compiled import lib

_BYTES: Final = 1 << 28
"""More than caches hold."""
_ROUNDS: Final = 64
PROBED_GROUP: Final = 32
"""Columns of the groups that `probe_multiply_codes` scales."""


@dataclass(frozen=True)
class Rates:
    """What all threads together reach."""

    read: float
    """Bytes of memory per second."""
    multiply: float
    """Operations per second in registers: two per multiply-add of bf16 numbers."""
    multiply_codes8: float
    """The same of rows of codes with weights of eight bits."""
    multiply_codes4: float
    """The same with weights of four bits, which AVX2 multiplies faster."""
    multiply_groups8: float
    """The same of eight bits in groups of 32 columns, where each sum of a group is scaled."""
    multiply_groups4: float

    def seconds_per_group(self, bits: int) -> float:
        """What it takes to scale the sum of a group of codes and to add it to the others."""
        whole, groups = {
            8: (self.multiply_codes8, self.multiply_groups8),
            4: (self.multiply_codes4, self.multiply_groups4),
        }[bits]
        return 2 * PROBED_GROUP * max(1 / groups - 1 / whole, 0.0)

    def mean(self, other: Rates) -> Rates:
        """What held between two measurements."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Rates(*((before + after) / 2 for before, after in pairs))


class Probe:
    """Memory to read, 256 MiB of it; needs the compiled module."""

    def __init__(self) -> None:
        # Written to: pages that nobody wrote to are all the same one.
        memory = np.ones(_BYTES + 64, np.uint8)
        self._memory = memory[-memory.ctypes.data % 64 :][:_BYTES]

    def measure(self, seconds: float = 0.3) -> Rates:
        """Medians over about this time."""
        part = seconds / 6
        read = _seconds_of(lambda: lib.probe_read(self._memory.ctypes.data, _BYTES), part)
        return Rates(
            _BYTES / read,
            _rate_of(lambda: lib.probe_multiply(_ROUNDS), part),
            _rate_of(lambda: lib.probe_multiply_codes(_ROUNDS, 8, False), part),
            _rate_of(lambda: lib.probe_multiply_codes(_ROUNDS, 4, False), part),
            _rate_of(lambda: lib.probe_multiply_codes(_ROUNDS, 8, True), part),
            _rate_of(lambda: lib.probe_multiply_codes(_ROUNDS, 4, True), part),
        )


def _rate_of(call: Callable[[], float], budget: float) -> float:
    """Operations per second of a call that tells how many it did."""
    return call() / _seconds_of(call, budget)


def _seconds_of(call: Callable[[], object], budget: float) -> float:
    call()
    end = time.perf_counter() + budget
    taken = []
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
