"""While a core starts nothing is collected; afterwards all is as it was, whatever came of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fake_executor import FakeExecutor
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.errors import StartupError
from quire.executor.base import ExecutorInfo, Progress


class Starting(FakeExecutor):
    """Notes whether the collector runs while it starts, and may fail then."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(lambda prompt, number: 7)
        self.error, self.collected = error, True

    def start(self, progress: Progress | None = None) -> ExecutorInfo:
        self.collected = gc.isenabled()
        if self.error:
            raise self.error
        return super().start(progress)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("error", [None, StartupError("no memory")], ids=["starts", "fails"])
def test_the_collector_pauses(before: bool, error: Exception | None) -> None:
    (gc.enable if before else gc.disable)()
    executor = Starting(error)
    try:
        EngineCore(EngineConfig.from_options(), executor=executor)
    except StartupError:
        assert error is not None
    assert executor.collected is False and gc.isenabled() is before
