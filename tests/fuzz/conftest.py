"""What every fuzz test gets: its randomness, and a line that repeats it if it fails."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import pytest

from fuzz_kit import generator, replay_line, time_is_over


@pytest.fixture
def rng(request: pytest.FixtureRequest, fuzz_number: int) -> random.Random:
    """All the randomness a case may use."""
    if time_is_over():
        pytest.skip("the time of this round is over")
    return generator(request.function.__name__, fuzz_number)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    """A failed case ends with the command that runs it alone."""
    report = yield
    spec = getattr(item, "callspec", None)
    if report.failed and spec is not None and "fuzz_number" in spec.params:
        line = replay_line(item.nodeid, spec.params["fuzz_number"])
        report.sections.append(("to repeat this case", line))
    return report
