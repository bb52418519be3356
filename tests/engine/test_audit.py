"""When the engine looks at its books: on falling idle, seldom, and at its end."""

from __future__ import annotations

import pytest

from fake_executor import FakeExecutor
from quire.config import EngineConfig
from quire.engine.core import AUDIT_SHARE, EngineCore
from quire.engine.messages import EngineCoreRequest
from quire.params import SamplingParams
from quire.utils.timing import ManualClock


class Books:
    """Counts looks at the books; each takes 10 ms."""

    def __init__(self, core: EngineCore, clock: ManualClock) -> None:
        self.core, self.clock, self.looks = core, clock, 0
        check = core.scheduler.check_integrity

        def counted() -> None:
            self.looks += 1
            clock.advance(0.01)
            check()

        core.scheduler.check_integrity = counted  # type: ignore[method-assign]

    def serve(self, name: str) -> None:
        params = SamplingParams(max_tokens=2, seed=1)
        self.core.add_request(EngineCoreRequest(name, name, 0, [5] * 20, params, 0.0))
        while self.core.has_requests:
            self.core.step()


@pytest.fixture
def books() -> Books:
    clock = ManualClock()
    config = EngineConfig.from_options()
    return Books(EngineCore(config, executor=FakeExecutor(lambda p, n: 7), clock=clock), clock)


def test_not_after_every_request(books: Books) -> None:
    books.serve("first")
    assert books.looks == 1
    books.serve("at once")
    assert books.looks == 1, "the next request would have waited for it"
    books.clock.advance(0.01 / AUDIT_SHARE)
    books.serve("later")
    assert books.looks == 2


def test_a_leak_is_reported_at_the_end_at_the_latest(
    books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    books.serve("first")
    leaked = books.core.kv.block_pool.get_new_blocks(1)
    books.serve("second")
    assert leaked and "integrity check failed" not in caplog.text
    books.core.shutdown()
    assert "integrity check failed" in caplog.text
