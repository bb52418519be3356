"""Every decision leaves a record that says why."""

from __future__ import annotations

import pytest

from quire.core.batch import BatchResult
from quire.core.facts import RECORD_BYTES, FactKind, Loss, Wait, unpack
from quire.core.request import RequestStatus


class Told:
    """The records of a bench's steps, with names instead of numbers."""

    def __init__(self, bench):
        self.bench = bench
        self.names = {0: None}
        self.all = []

    def step(self):
        self.bench.step()
        scheduler = self.bench.scheduler
        stats = scheduler.make_stats(self.bench.last, BatchResult({}), [])
        self.names.update(stats.names)
        facts = list(unpack(stats.facts))
        self.all += facts
        return [
            (FactKind(f.kind), self.names[f.request], f.reason, f.a, f.b)
            for f in facts
            if f.kind != FactKind.STEP
        ]

    def of(self, kind):
        return [f for f in self.all if f.kind == kind]


def test_a_request_from_queue_to_end(make):
    bench = make(budget=16, caching=False)
    told = Told(bench)
    bench.add("a", 40, max_tokens=2)
    assert told.step() == [
        (FactKind.QUEUED, "a", 0, 40, 0),
        (FactKind.ADMITTED, "a", 0, 16, 0),
    ]
    assert told.step() == [(FactKind.CHUNK, "a", 0, 16, 16)]
    assert told.step() == [(FactKind.CHUNK, "a", 0, 8, 32)]
    assert told.step() == [(FactKind.FINISHED, "a", RequestStatus.FINISHED_LENGTH_CAPPED, 2, 3)]
    steps = told.of(FactKind.STEP)
    assert [f.step for f in steps] == [1, 2, 3, 4]
    assert {(f.a) for f in steps} == {16}


def test_a_change_of_limits(make):
    bench = make(budget=16, caching=False)
    told = Told(bench)
    bench.add("a", 4, max_tokens=3)
    told.step()
    bench.scheduler.set_limits(max_num_batched_tokens=12, max_num_seqs=3)
    bench.scheduler.set_limits(max_num_seqs=3)  # that is no change
    assert told.step() == [(FactKind.LIMITS, None, 0, 3, 12)]


def test_the_prefix_cache_is_emptied(make):
    bench = make(budget=16)
    told = Told(bench)
    bench.add("a", 40, max_tokens=1)
    told.step()
    assert not bench.scheduler.reset_prefix_cache(), "a request holds blocks"
    while bench.scheduler.requests:
        assert FactKind.CACHE_DROPPED not in [fact[0] for fact in told.step()]
    assert bench.scheduler.drop_free_content() == 3, "two whole blocks, and one in part"
    assert bench.scheduler.reset_prefix_cache()
    bench.add("b", 4, max_tokens=1)
    emptied = [fact for fact in told.step() if fact[0] is FactKind.CACHE_DROPPED]
    assert emptied == [(FactKind.CACHE_DROPPED, None, 0, only_free, 0) for only_free in (1, 0)]


def test_decodes_need_no_records(make):
    bench = make()
    told = Told(bench)
    for i in range(5):
        bench.add(f"r{i}", 4, max_tokens=9)
    told.step()
    assert [told.step() for _ in range(5)] == [[]] * 5


def wait_of(told):
    [said] = [f for f in told.step() if f[0] is FactKind.WAITS]
    return said[1], Wait(said[2]), said[3], said[4]


@pytest.mark.parametrize(
    "limits, prompts, expected",
    [
        ({"seqs": 1}, (8, 8), ("b", Wait.MAX_NUM_SEQS, 2, 1)),
        ({"budget": 16}, (16, 8), ("b", Wait.BUDGET, 1, 0)),
        ({"num_blocks": 4}, (40, 30), ("b", Wait.BLOCKS, 2, 0)),
        ({"num_blocks": 6, "watermark": 0.4}, (40, 10), ("b", Wait.BLOCKS, 3, 2)),
        (
            {"budget": 32, "enable_chunked_prefill": False, "max_model_len": 32},
            (20, 20),
            ("b", Wait.BUDGET, 20, 12),
        ),
    ],
)
def test_why_the_head_of_the_queue_waits(make, limits, prompts, expected):
    bench = make(caching=False, **limits)
    told = Told(bench)
    for name, prompt in zip("ab", prompts, strict=True):
        bench.add(name, prompt, max_tokens=9)
    assert wait_of(told) == expected
    again = [f for f in told.step() if f[0] is FactKind.WAITS]
    assert not again or again[0][2] != expected[1], "the same reason is said once"


def test_the_delay_factor_is_the_policys_reason(make):
    bench = make(scheduler_delay_factor=5.0)
    told = Told(bench)
    bench.add("a", 8, max_tokens=9)
    told.step()
    bench.wait(1.0)
    bench.add("b", 8)
    assert wait_of(told) == ("b", Wait.POLICY, 0, 0)


def test_who_was_preempted_for_whom(make):
    bench = make(num_blocks=5, block_size=16, caching=False)
    told = Told(bench)
    bench.add("a", 31, max_tokens=30)
    bench.add("b", 31, max_tokens=30)
    while not told.of(FactKind.PREEMPTED):
        told.step()
    [fact] = told.of(FactKind.PREEMPTED)
    assert (told.names[fact.request], told.names[fact.other]) == ("b", "a")
    assert (fact.reason, fact.a, fact.b) == (Loss.BLOCKS, 32, 2)
    assert told.of(FactKind.WAITS)[-1].reason == Wait.PREEMPTION


def test_who_has_to_give_way_to_a_more_urgent_one(make):
    bench = make(seqs=1, scheduling_policy="priority", priority_preemption=True)
    told = Told(bench)
    bench.add("a", 8, priority=5, max_tokens=9)
    told.step()
    bench.add("b", 8, priority=1, max_tokens=1)
    told.step()
    [fact] = told.of(FactKind.PREEMPTED)
    assert (told.names[fact.request], told.names[fact.other]) == ("a", "b")
    assert fact.reason == Loss.URGENCY
    told.step()
    assert told.of(FactKind.ADMITTED)[-1].reason == 1, "it came back"


def test_who_got_nothing_of_the_budget(make):
    bench = make(budget=4, seqs=4)
    told = Told(bench)
    for i in range(4):
        bench.add(f"r{i}", 1, max_tokens=9)
    told.step()
    bench.scheduler.set_limits(max_num_batched_tokens=3, max_num_seqs=3)
    assert (FactKind.STALLED, None, Wait.BUDGET, 1, 0) in told.step()


def test_block_traffic_adds_up(make):
    bench = make(num_blocks=9, block_size=16)
    allocated = freed = evicted = 0
    for i in range(4):
        bench.add(f"r{i}", [i] * 40, max_tokens=4)
        while bench.scheduler.requests:
            outputs = bench.step()
            stats = bench.scheduler.make_stats(bench.last, BatchResult({}), outputs)
            allocated += stats.num_blocks_allocated
            freed += stats.num_blocks_freed
            evicted += stats.num_blocks_evicted
    assert allocated == freed == 4 * 3
    assert evicted > 0


def test_half_a_record_is_refused():
    with pytest.raises(ValueError, match=f"73 bytes are no whole number of {RECORD_BYTES}"):
        list(unpack(bytes(73)))


def test_counters_beyond_32_bits_and_what_is_beyond_64(make):
    bench = make(scheduling_policy="priority")
    told = Told(bench)
    scheduler = bench.scheduler
    scheduler.books.step = scheduler.facts._next_number = 2**32 + 5
    bench.add("a", 4, max_tokens=2, priority=-(2**63))
    bench.add("b", 4, max_tokens=2, priority=2**63 - 1)
    told.step()
    assert [(f.request, f.c) for f in told.of(FactKind.QUEUED)] == [
        (2**32 + 5, -(2**63)),
        (2**32 + 6, 2**63 - 1),
    ]
    assert {f.step for f in told.of(FactKind.STEP)} == {2**32 + 6}
    scheduler.facts.add(FactKind.QUEUED, 1, a=2**63, c=-(2**70))
    (fact,) = unpack(scheduler.facts.take()[0])
    assert (fact.a, fact.c) == (2**63 - 1, -(2**63 - 1)), "told as the largest that can be"
