"""The frame of the fuzz tests: cases that follow from one number each.

    from fuzz_kit import cases

    @cases(12)
    def test_something(rng: random.Random) -> None:
        ...

runs twelve cases, numbers 0 to 11. `rng` is all the randomness a case may use: it is seeded with
the case's number and the test's name, so a number always gives the same case, alone or among
others, on any machine. (What a library draws by itself must be seeded from it too:
`np.random.default_rng(rng.getrandbits(64))`.) A case that fails says how to run it alone:

    QUIRE_FUZZ_SEED=7 python -m pytest tests/fuzz/test_x.py::test_something

- `make test` runs the numbers from 0 up, the same on every machine: their count is fixed, not
  their time. All of tests/fuzz together may cost about 120 seconds of one core: sampling 20,
  mixes 25, schemes 6, checkpoints 20, records 10, streams 10, exceptions in steps 15, doors 15,
  bodies 5.
- `make fuzz MINUTES=480` (or HOURS=8) runs rounds with numbers nobody has tried, prints the first
  number of each, and at the end the line that repeats each failure. When the time is over, the
  cases that have not begun are skipped.

Costly things (an engine, a server) belong into fixtures of module scope and must be left by each
case as they were found; a case that cannot promise this, because it breaks something on purpose,
makes its own. A case takes at most a few seconds, and one that depends on a clock waits for facts,
not for seconds. Whatever can be enumerated is no case for chance: parametrise it.

The environment, read here only:

- `QUIRE_FUZZ_SEED`: run just this number, of every fuzz test that is selected.
- `QUIRE_FUZZ_FIRST`: the first number of a round, instead of 0.
- `QUIRE_FUZZ_TIMES`: so many times the cases of the short run (may be a fraction; at least one).
- `QUIRE_FUZZ_UNTIL`: skip cases that would begin after this moment of the monotonic clock.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

NUMBER_BITS = 48
"""Numbers of random rounds: short enough to be read to somebody, too many to meet twice."""


def numbers(short: int) -> list[int]:
    """The numbers to run where the short run has so many cases."""
    alone = os.environ.get("QUIRE_FUZZ_SEED")
    if alone:
        return [int(alone)]
    first = int(os.environ.get("QUIRE_FUZZ_FIRST") or 0)
    times = float(os.environ.get("QUIRE_FUZZ_TIMES") or 1)
    return list(range(first, first + max(1, round(short * times))))


def cases(short: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test for many numbers; its argument `rng` follows from the number and its name.

    Args:
        short: How many cases `make test` runs.
    """
    return pytest.mark.parametrize("fuzz_number", numbers(short))


def generator(test: str, number: int) -> random.Random:
    """The randomness of one case. Strings seed by their SHA-512: the same everywhere."""
    return random.Random(f"{test} {number}")


def replay_line(nodeid: str, number: int) -> str:
    """The command that runs one case alone."""
    path, _, test = nodeid.partition("::")
    name, bracket, parameters = test.partition("[")
    # Without the number, which the variable gives; other parameters are chosen by -k.
    others = parameters.rstrip("]").split("-") if bracket else []
    others = [word for word in others if word != str(number)]
    chosen = f" -k '{' and '.join(others)}'" if others else ""
    return f"QUIRE_FUZZ_SEED={number} python -m pytest {path}::{name}{chosen}"


def time_is_over() -> bool:
    """Whether a round has used up its time."""
    until = os.environ.get("QUIRE_FUZZ_UNTIL")
    return bool(until) and time.monotonic() > float(until or 0)
