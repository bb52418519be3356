"""The server looks for garbage by the clock, a little at a time while it works."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from patience import PATIENCE
from quire.utils import collector
from quire.utils.collector import PacedCollection


@asynccontextmanager
async def _collecting(busy: bool) -> AsyncIterator[Counter[int]]:
    """How often each generation was looked at."""
    told: Counter[int] = Counter()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            told[info["generation"]] += 1

    task = asyncio.ensure_future(PacedCollection(lambda: busy).run())
    await asyncio.sleep(0)
    gc.callbacks.append(note)
    try:
        yield told
    finally:
        gc.callbacks.remove(note)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class _Node:
    """One of a circle."""

    next: _Node


def _circle() -> weakref.ref[_Node]:
    node = _Node()
    node.next = node
    return weakref.ref(node)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "PERIOD_SECONDS", 0.001)


async def test_python_does_not_collect_by_itself_meanwhile() -> None:
    async with _collecting(busy=True):
        assert not gc.isenabled()
    assert gc.isenabled()


async def test_while_there_is_work_only_what_is_new_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector, "CALM_PERIODS", 10)
    async with _collecting(busy=True) as told:
        kept = [[] for _ in range(100_000)]  # Python would look at everything some times
        await _until(lambda: told[1] >= 20)
        assert told[0] > told[1]
        assert not told[2]
    assert len(kept) == 100_000


async def test_everything_is_looked_at_in_the_end_also_under_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector, "BUSY_PERIODS", 10)
    async with _collecting(busy=True) as told:
        await _until(lambda: told[2] >= 3)


@pytest.mark.parametrize("busy", [False, True])
async def test_a_circle_is_found(busy: bool) -> None:
    async with _collecting(busy):
        circle = _circle()
        await _until(lambda: circle() is None)


async def test_an_old_circle_is_found_when_there_is_no_work() -> None:
    node = _Node()
    node.next = node
    circle = weakref.ref(node)
    gc.collect()
    gc.collect()  # it is old
    del node
    async with _collecting(busy=False):
        await _until(lambda: circle() is None)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.005)
