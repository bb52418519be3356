"""What the service manager is told as the server loads, serves, replaces its core and drains."""

from __future__ import annotations

import pytest

from fake_engine import FakeEngine
from quire.config import ServerConfig
from quire.serving.server_state import ServerState
from quire.serving.service_report import ServiceReport
from quire.utils.service import ServiceManager
from quire.utils.timing import ManualClock


class Manager(ServiceManager):
    """Keeps what it is told."""

    def __init__(self, watchdog: float | None = None) -> None:
        self.watchdog_seconds = watchdog
        self.told: list[dict[str, str | int]] = []

    def tell(self, **fields: str | int) -> None:
        self.told.append(fields)


class World:
    def __init__(self, watchdog: float | None = None) -> None:
        self.clock, self.engine = ManualClock(), FakeEngine()
        self.state = ServerState(ServerConfig(shutdown_timeout=25), self.engine, self.clock)
        self.manager = Manager(watchdog)
        self.report = ServiceReport(self.state, self.manager, self.clock)

    def told(self) -> list[dict[str, str | int]]:
        """By one look."""
        self.manager.told.clear()
        self.report.look()
        return list(self.manager.told)

    def load(self, percent: int, state: str = "loading") -> None:
        self.engine.state, self.engine.progress = state, ("weights", percent, 100)


def test_the_life_of_a_server() -> None:
    world = World()
    world.load(25)
    more = {"EXTEND_TIMEOUT_USEC": 120_000_000}
    assert world.told() == [{"STATUS": "loading: weights, 25 %", **more}]
    assert world.told() == [], "a load that stands still gets no more time"
    world.load(50)
    assert world.told() == [{"STATUS": "loading: weights, 50 %", **more}]
    world.engine.state = "ready"
    assert world.told() == [{"STATUS": "ready"}], "not before the server says so"
    world.state.mark_started()
    assert world.told() == [{"READY": 1, "STATUS": "ready"}]
    assert world.told() == []
    world.load(10, "replacing")
    assert world.told() == [{"STATUS": "replacing: weights, 10 %"}]
    world.engine.state = "ready"
    assert world.told() == [{"READY": 1, "STATUS": "ready"}]
    world.state.answering = 3
    world.state.begin_drain(25)
    (last,) = world.told()
    assert last == {
        "STOPPING": 1,
        "STATUS": "draining: 3 request(s)",
        "EXTEND_TIMEOUT_USEC": 30_000_000,
    }


@pytest.mark.parametrize("state", ["loading", "ready", "replacing"])
def test_it_is_alive_unless_a_restart_would_help(state: str) -> None:
    world = World(watchdog=30)
    world.engine.state = state
    alive = {"WATCHDOG": 1}
    assert alive in world.told() and alive not in world.told()
    world.clock.advance(14.9)
    assert alive not in world.told()
    world.clock.advance(0.1)
    assert alive in world.told(), "at half of the interval"
    world.engine.state = "dead"
    world.clock.advance(30)
    assert alive not in world.told()
