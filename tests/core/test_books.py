"""The books without a scheduler: rules act on them alone, and their check notices what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.config.scheduler import SchedulerConfig
from quire.core.books import Books
from quire.core.facts import Loss
from quire.core.kv.block import KVBlock
from quire.core.kv.holding import Holding
from quire.core.kv.manager import KVCacheManager
from quire.core.plan import StepPlan
from quire.core.request import Request, RequestStatus
from quire.core.rules.admit import admit_waiting
from quire.core.rules.continue_running import continue_running
from quire.core.rules.preempt import preempt
from quire.params import SamplingParams
from quire.utils.timing import ManualClock


@pytest.fixture
def books() -> Books:
    """Three requests wait."""
    kv = KVCacheManager(40, 16, max_model_len=512)
    books = Books(SchedulerConfig(max_num_seqs=2), kv, 512, ManualClock())
    for name in "abc":
        books.queue(Request(name, list(range(20)), SamplingParams(max_tokens=9)))
    return books


def plan(budget: int = 100) -> StepPlan:
    return StepPlan(budget, now=0.0, chunk_limit=budget)


def test_rules_need_nothing_but_the_books(books: Books) -> None:
    first = plan()
    admit_waiting(books, first)
    assert list(first.scheduled) == ["a", "b"] == [r.request_id for r in books.running]
    for request in books.running:
        request.all_token_ids.append(7)
    second = plan()
    continue_running(books, second)
    assert second.scheduled == {"a": 1, "b": 1}
    books.check_integrity()


def test_a_rule_of_ones_own(books: Books) -> None:
    """Requests give way in turn: a rule that is written here, and leaves whole books."""

    def take_turns(books: Books) -> None:
        if books.waiting and books.running:
            preempt(books, books.running.pop(0), Loss.URGENCY)

    admit_waiting(books, plan())
    take_turns(books)
    assert [r.request_id for r in books.running] == ["b"]
    assert books.waiting.peek_request(0.0).request_id == "a"
    books.check_integrity()


def stand_twice(books: Books) -> None:
    books.running.append(books.running[0])


def forget(books: Books) -> None:
    del books.requests["c"]


def lose(books: Books) -> None:
    books.waiting.remove_request(books.requests["c"])


def run_without_status(books: Books) -> None:
    books.running[0].status = RequestStatus.WAITING


def wait_with_blocks(books: Books) -> None:
    request = books.running.pop()
    request.status = RequestStatus.PREEMPTED
    books.waiting.prepend_request(request)


def run_ahead(books: Books) -> None:
    books.running[0].num_computed_tokens = 21


def run_too_many(books: Books) -> None:
    books.max_running = 1


def compute_outside_blocks(books: Books) -> None:
    request = books.running[0]
    request.all_token_ids += range(20)
    request.num_computed_tokens = 33


def compute_while_waiting(books: Books) -> None:
    books.requests["c"].num_computed_tokens = 5


def run_with_nothing_computed(books: Books) -> None:
    books.running[0].num_computed_tokens = 0


def be_quiet_too_long(books: Books) -> None:
    books.running[0].num_quiet_tokens = 33


def stand_aside_as_well(books: Books) -> None:
    books.aside["a"] = books.requests["a"]


def hold_for_nobody(books: Books) -> None:
    held = Holding(1)
    held.tables[0].extend(books.kv.block_pool.get_new_blocks(1))
    books.kv.tables.hold("gone", held)


def hold_other_blocks(books: Books) -> None:
    books.running[0].block_hashes[0] = bytes(32)


def exchange_blocks(books: Books) -> None:
    (table,) = books.kv.tables.held["a"].tables
    table.reverse()


def register_too_few(books: Books) -> None:
    books.kv.tables.held["a"].num_cached = 0


def register_too_many(books: Books) -> None:
    books.kv.tables.held["a"].num_cached = 2


def hash_too_much(books: Books) -> None:
    books.running[0].block_hashes.append(bytes(32))


def be_ready_later(books: Books) -> None:
    block = books.kv.tables.held["a"].tables[0][0]
    assert block.origin is not None
    block.origin = block.origin._replace(ready_at=9)


def link_a_held_block(books: Books) -> None:
    books.kv.tables.held["a"].tables[0][0].next_free = KVBlock(99)


@pytest.mark.parametrize(
    "spoil, told",
    [
        (stand_twice, "two places"),
        (forget, "lost or forgotten"),
        (lose, "lost or forgotten"),
        (run_without_status, "is in running"),
        (wait_with_blocks, "waits holding blocks"),
        (run_ahead, "is ahead"),
        (run_too_many, "max_num_seqs"),
        (compute_outside_blocks, "outside its blocks"),
        (compute_while_waiting, "waits having computed"),
        (run_with_nothing_computed, "computed nothing"),
        (be_quiet_too_long, "quiet outside its blocks"),
        (stand_aside_as_well, "is still there"),
        (hold_for_nobody, r"held for \['gone'\]"),
        (hold_other_blocks, "holds another's"),
        (exchange_blocks, "is not full"),
        (register_too_few, "is not full"),
        (register_too_many, "has 2 full blocks"),
        (hash_too_much, "has 2 hashes"),
        (be_ready_later, "ready in a later step"),
        (link_a_held_block, "held and linked"),
    ],
)
def test_the_check_notices(books: Books, spoil: Callable[[Books], None], told: str) -> None:
    admit_waiting(books, plan())
    books.check_integrity()
    spoil(books)
    with pytest.raises(AssertionError, match=told):
        books.check_integrity()
