"""Cores in processes: which process the next core gets, and what memory it inherits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.cores import spare as spare_module
from quire.engine.cores.kept_memory import KeptMemory
from quire.engine.cores.spare import CoreProcesses
from quire.utils import memory_file

CONFIG = EngineConfig()
linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")


class Process:
    """A process that does nothing."""

    def __init__(self) -> None:
        self.pid = 1
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code


class Child:
    """As `CoreChild`; prepared when the test says so."""

    def __init__(self, weights: int | None) -> None:
        self.weights = weights
        self.process = Process()
        self.closed = False
        self.prepared: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        self.closed = True

    def end(self, grace: float) -> None:
        self.process.code = -9


class World:
    def __init__(self, warm_spare: bool = True) -> None:
        self.children: list[Child] = []
        self.has_room = True
        self.fails = 0
        self.processes = CoreProcesses(warm_spare, lambda: self.has_room, self._new)  # type: ignore[arg-type]

    def _new(self, weights: int | None) -> Any:
        if self.fails:
            self.fails -= 1
            raise OSError("no more processes")
        self.children.append(Child(weights))
        return self.children[-1]

    def core(self) -> Child:
        """The next core's process; it becomes ready at once."""
        child: Any = self.processes.child_for(CONFIG)
        self.processes.core_is_ready()
        return child

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0)

    async def spare(self) -> Child:
        """A spare that is ready."""
        await self.until(lambda: self.processes.spare == "starting")
        child = self.children[-1]
        child.prepared.set_result(True)
        await self.until(lambda: self.processes.spare == "ready")
        return child


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_module, "LOOK_SECONDS", 0.0)

    async def prepare(child: Child, config: EngineConfig) -> bool:
        assert config is CONFIG
        return await child.prepared

    monkeypatch.setattr(spare_module, "_prepare", prepare)


@asynccontextmanager
async def world(**how: Any) -> AsyncIterator[World]:
    made = World(**how)
    try:
        yield made
    finally:
        await made.processes.close()
        assert made.processes.spare in ("off", "none")


def play(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_without_the_option_there_is_none() -> None:
    async def scenario() -> None:
        async with world(warm_spare=False) as w:
            w.core()
            await asyncio.sleep(0.01)
            assert w.processes.spare == "off" and len(w.children) == 1

    play(scenario)


def test_the_spare_becomes_the_next_core() -> None:
    async def scenario() -> None:
        async with world() as w:
            first = w.core()
            spare = await w.spare()
            assert w.core() is spare and not spare.closed
            third = await w.spare()
            assert third not in (first, spare) and len(w.children) == 3
        assert third.closed and not spare.closed

    play(scenario)


def test_one_that_is_not_ready_is_not_waited_for() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.core()
            await w.until(lambda: w.processes.spare == "starting")
            early = w.children[-1]
            fresh = w.core()
            assert fresh is not early and early.closed
            assert w.core() is not early
        assert early.process.code is not None

    play(scenario)


def test_none_behind_a_core_that_is_not_ready() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.core()
            await w.spare()
            w.processes.child_for(CONFIG)
            await asyncio.sleep(0.01)
            assert w.processes.spare == "none"
            w.processes.core_is_ready()
            await w.spare()

    play(scenario)


def test_a_dead_spare_is_replaced_and_never_a_core() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.core()
            dead = await w.spare()
            dead.process.code = -9
            await w.until(lambda: len(w.children) == 3)
            assert dead.closed
            late = await w.spare()
            late.process.code = -9  # and a core is needed before anybody notices
            assert w.core() is not late and late.closed

    play(scenario)


def test_it_waits_for_room() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.has_room = False
            w.core()
            await asyncio.sleep(0.01)
            assert w.processes.spare == "none" and len(w.children) == 1
            w.has_room = True
            await w.spare()

    play(scenario)


def test_attempts_that_fail_are_made_again() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.core()
            w.fails = 2
            await w.until(lambda: w.processes.spare == "starting")
            w.children[-1].prepared.set_result(False)  # it died
            await w.until(lambda: len(w.children) == 3)
            await w.spare()

    play(scenario)


def test_room_is_memory_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.core.stats import MachineStats

    seen: Iterator[MachineStats | None] = iter(
        [
            None,
            MachineStats(1.0, 1.0, 50.0, 2, None, None),
            MachineStats(2.0, 1.0, 0.0, 2, None, 0.5),
            MachineStats(3.0, 1.0, 0.0, 2, None, 0.0),
        ]
    )
    room = spare_module.Room()
    monkeypatch.setattr(room._machine, "read", lambda now: next(seen))
    monkeypatch.setattr(spare_module, "available_memory", lambda: 1 << 30)
    assert [room() for _ in range(3)] == [False, True, False]
    monkeypatch.setattr(spare_module, "available_memory", lambda: 100 << 20)
    assert not room()


@linux
def test_memory_of_a_core_that_did_not_finish_is_given_up() -> None:
    kept = KeptMemory()
    first = kept.for_core()
    assert first is not None and kept.filled() is None
    seen = os.fstat(first).st_ino
    second = kept.for_core()
    assert second is not None and os.fstat(second).st_ino != seen
    memory_file.seal(second)
    assert kept.for_core() == kept.filled() == second
    kept.close()
    with pytest.raises(OSError):
        os.fstat(second)


@linux
def test_cores_and_spares_share_what_is_filled() -> None:
    async def scenario() -> None:
        async with world() as w:
            first = w.core()
            assert first.weights is not None
            spare = await w.spare()
            assert spare.weights is None, "nothing is packed yet"
            memory_file.seal(first.weights)
            second = w.core()
            assert second is spare
            assert (await w.spare()).weights == first.weights == w.processes._kept.for_core()

    play(scenario)


@linux
def test_no_memory_of_that_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_file, "create", lambda name: None)
    kept = KeptMemory()
    assert kept.for_core() is None and kept.filled() is None
    kept.close()
