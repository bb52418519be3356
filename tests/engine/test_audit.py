"""When the engine looks at its books: on falling idle, seldom, and at its end; never for long, and
never before it has said what a step gave."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fake_executor import FakeExecutor
from quire.config import EngineConfig
from quire.core.kv.pool import PART
from quire.engine.core import AUDIT_SECONDS, AUDIT_SHARE, AUDIT_STEPS, EngineCore
from quire.engine.cores.inline import InlineCore
from quire.engine.messages import EngineCoreRequest
from quire.params import SamplingParams
from quire.utils.timing import ManualClock


class Books:
    """Counts the parts of looks at the books; each takes 10 ms, so one is a look."""

    def __init__(self, core: EngineCore, clock: ManualClock, seconds: float = 0.01) -> None:
        self.core, self.clock, self.looks = core, clock, 0
        parts = core.scheduler.integrity_parts

        def counted() -> Iterator[None]:
            for _ in parts():
                self.looks += 1
                clock.advance(seconds)
                yield

        core.scheduler.integrity_parts = counted  # type: ignore[method-assign]

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


def lose_a_block(core: EngineCore) -> None:
    core.kv.block_pool.get_new_blocks(1)


def lose_a_reference(core: EngineCore) -> None:
    next(b for b in core.kv.block_pool.blocks[1:] if b.ref_cnt).ref_cnt += 1


def forget_a_table(core: EngineCore) -> None:
    core.kv.tables.held.popitem()


def lose_a_request(core: EngineCore) -> None:
    del core.scheduler.requests[core.scheduler.running[0].request_id]


def seat_it_twice(core: EngineCore) -> None:
    core.scheduler.running.append(core.scheduler.running[0])


def lose_a_hash(core: EngineCore) -> None:
    block = next(b for b in core.kv.block_pool.blocks if b.block_hash)
    block.block_hash = b"of something else"


def break_the_free_queue(core: EngineCore) -> None:
    core.kv.block_pool._free._count += 3


def run_ahead(core: EngineCore) -> None:
    core.scheduler.running[0].num_computed_tokens += 500


class ForgetfulExecutor(FakeExecutor):
    def reset(self) -> None:  # type: ignore[override]
        self.known.clear()


def serve_three(damage: Callable[[EngineCore], None] | None) -> tuple[dict[str, Any], EngineCore]:
    """Tokens of three requests; the books are damaged when they are half done."""
    executor = ForgetfulExecutor(lambda prompt, n: 300 + (sum(prompt) + n) % 50)
    core = EngineCore(EngineConfig.from_options(), executor=executor, clock=ManualClock())
    for number, name in enumerate("abc"):
        params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
        core.add_request(EngineCoreRequest(name, name, 0, [5 + number] * 40, params, 0.0))
    tokens: dict[str, list[int]] = {}
    failures = 0
    for step in range(100):
        outputs, stats = core.step() if core.has_requests else ([], None)
        failures += stats.num_integrity_failures if stats else 0
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        if damage is not None and step == 20:
            damage(core)
            core._audit()
    core.scheduler.check_integrity()
    assert not core.has_requests and core.kv.usage == 0.0
    return {"tokens": tokens, "failures": failures}, core


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        lose_a_reference,
        forget_a_table,
        lose_a_request,
        seat_it_twice,
        lose_a_hash,
        break_the_free_queue,
        run_ahead,
    ],
)
def test_wrong_books_are_made_anew_and_nobody_notices(
    damage: Callable[[EngineCore], None], caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = serve_three(None)
    assert expected["failures"] == 0 and "integrity" not in caplog.text
    got, _ = serve_three(damage)
    assert got == {"tokens": expected["tokens"], "failures": 1}
    [dump] = [r.args[0] for r in caplog.records if r.msg == "the books: %s"]  # type: ignore[index]
    assert {r["id"] for r in json.loads(str(dump))["requests"]} == set("abc")


def test_a_busy_engine_looks_every_so_many_steps(books: Books) -> None:
    params = SamplingParams(max_tokens=3 * AUDIT_STEPS, seed=1, ignore_eos=True)
    books.core.add_request(EngineCoreRequest("a", "a", 0, [5] * 20, params, 0.0))
    for _ in range(AUDIT_STEPS):
        assert books.looks == 0
        books.core.step()
    assert books.looks == 1
    for _ in range(AUDIT_STEPS):
        books.core.step()
    assert books.looks == 1, "its share of the time is used up"
    books.clock.advance(0.01 / AUDIT_SHARE)
    for _ in range(AUDIT_STEPS):
        books.core.step()
    assert books.looks == 2


def test_large_books_are_looked_at_bit_by_bit(caplog: pytest.LogCaptureFixture) -> None:
    """All of 3,000 blocks in the end, and never for much longer than is allowed at a time."""
    clock, blocks = ManualClock(), 3000
    executor = ForgetfulExecutor(lambda p, n: 7, num_blocks=blocks)
    core = EngineCore(EngineConfig.from_options(), executor=executor, clock=clock)
    books = Books(core, clock, 0.4 * AUDIT_SECONDS)
    core.kv.block_pool.blocks[-1].follower = core.kv.block_pool.blocks[1]
    turns = 0
    while "KVBlock(2999, ref_cnt=0, hash=None) is empty" not in caplog.text:
        before = books.looks
        books.serve(f"number {turns}")
        assert books.looks - before == 3 or caplog.text.count("integrity")
        clock.advance(1.0)
        turns += 1
        assert turns < 100, "the last block is never looked at"
    assert turns > blocks / PART / 3


def test_a_leak_is_found_first(caplog: pytest.LogCaptureFixture) -> None:
    """By an engine that falls idle, whatever part of its books it would have gone on with."""
    clock = ManualClock()
    executor = ForgetfulExecutor(lambda p, n: 7)
    books = Books(EngineCore(EngineConfig.from_options(), executor=executor, clock=clock), clock)
    for name in ("first", "second", "third"):
        books.serve(name)
        clock.advance(0.01 / AUDIT_SHARE)
    books.core.kv.block_pool.get_new_blocks(1)
    books.serve("fourth")
    assert "integrity check failed" in caplog.text and books.core.kv.usage == 0.0


def test_outputs_do_not_wait_for_a_look_at_the_books() -> None:
    """The last token of a request came after it: 30 ms later with 20,000 blocks."""
    said: list[str] = []
    core = InlineCore(1, lambda message: said.append(type(message).__name__),
                      executor=FakeExecutor(lambda p, n: 7), clock=ManualClock())  # fmt: skip
    core.start(EngineConfig.from_options())
    audit = core.core._audit

    def look(seconds: float) -> None:
        said.append("look")
        audit(seconds)

    core.core._audit = look  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=1, seed=1)
    core.core.add_request(EngineCoreRequest("a", "a", 0, [5] * 20, params, 0.0))
    core.step()
    assert said[-2:] == ["Outputs", "look"]


def test_a_mismatch_of_an_idle_engine_is_told_at_once(books: Books) -> None:
    books.core.executor.reset = lambda: None  # type: ignore[method-assign]
    books.serve("first")
    books.core.kv.block_pool.get_new_blocks(1)
    books.core._audit()
    assert books.core.has_requests
    assert books.core.step()[1].num_integrity_failures == 1
    assert not books.core.has_requests and books.core.kv.usage == 0.0
