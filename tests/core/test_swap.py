"""The second KV tier: swapped requests, demoted and promoted prefixes, failed copies."""

from __future__ import annotations

import dataclasses

import pytest

from quire.core.batch import BatchResult
from quire.core.facts import FactKind, unpack
from quire.core.kv.tier import HostTier
from quire.core.request import RequestStatus
from quire.core.swap_cost import SwapCost


@pytest.fixture
def make_swap(make):
    """As `make`, with a tier of `swap` blocks."""

    def build(swap=100, **options):
        return make(swap_blocks=swap, **{"preemption_mode": "swap", **options})

    return build


def run_until(bench, happened, limit=200):
    for _ in range(limit):
        bench.step()
        if happened():
            return
    raise AssertionError("it never happened")


@pytest.mark.parametrize("caching", [True, False])
def test_a_swapped_request_comes_back_where_it_was(make_swap, caching):
    bench = make_swap(num_blocks=5, caching=caching)
    bench.add("a", [5] * 31, max_tokens=20)
    b = bench.add("b", [6] * 31, max_tokens=30)
    run_until(bench, lambda: b.num_preemptions)
    swap = bench.scheduler.kv.swap
    assert (swap.num_swapped, swap.num_tokens_of("b")) == (1, 32)
    assert len(bench.last.swap_out) == 2
    assert bench.scheduler.kv.num_blocks_of("b") == 0
    run_until(bench, lambda: any(n.req_id == "b" for n in bench.last.scheduled_new_reqs))
    assert [n.num_computed_tokens for n in bench.last.scheduled_new_reqs] == [32]
    assert bench.scheduled["b"] == 1, "nothing is computed again"
    assert len(bench.last.swap_in) == 2
    assert swap.num_swapped == 0
    bench.drain()
    assert bench.tokens["b"] == [1000 + i for i in range(30)]


def test_no_room_in_the_tier_means_recompute(make_swap):
    bench = make_swap(swap=1, num_blocks=5, caching=False)
    bench.add("a", [5] * 31, max_tokens=20)
    b = bench.add("b", [6] * 31, max_tokens=30)
    run_until(bench, lambda: b.num_preemptions)
    assert bench.scheduler.kv.swap.num_swapped == 0
    assert bench.last.swap_out == []
    bench.drain()
    assert bench.tokens["b"] == [1000 + i for i in range(30)]


def test_an_aborted_request_leaves_the_tier(make_swap):
    bench = make_swap(num_blocks=5, caching=False)
    bench.add("a", [5] * 31, max_tokens=20)
    b = bench.add("b", [6] * 31, max_tokens=30)
    run_until(bench, lambda: b.num_preemptions)
    bench.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    assert bench.scheduler.kv.swap.usage == 0.0
    bench.drain()
    assert bench.scheduler.kv.swap.usage == 0.0


def test_the_check_notices_what_is_kept_for_nobody_or_not_whole(make_swap):
    bench = make_swap(num_blocks=5, caching=False)
    bench.add("a", [5] * 31, max_tokens=20)
    b = bench.add("b", [6] * 31, max_tokens=30)
    run_until(bench, lambda: b.num_preemptions)
    swapped = bench.scheduler.kv.swap._swapped
    kept = swapped["b"]
    swapped["b"] = dataclasses.replace(kept, num_computed_tokens=kept.num_computed_tokens + 1)
    with pytest.raises(AssertionError, match="b: 2 blocks for 3 in the tier"):
        bench.scheduler.check_integrity()
    swapped["a"] = kept
    del swapped["b"]
    with pytest.raises(AssertionError, match=r"\['a'\] are swapped out and do not wait"):
        bench.scheduler.check_integrity()


def test_nothing_is_swapped_into_a_block_that_has_a_new_holder(make_swap):
    """Blocks that fall out of a window are given up in the step that brings them back, and may be
    taken in it: what is copied into them then must not be overwritten."""
    bench = make_swap(num_blocks=5, caching=False)
    bench.add("a", [5] * 31, max_tokens=20)
    b = bench.add("b", [6] * 31, max_tokens=30)
    run_until(bench, lambda: b.num_preemptions)
    bench.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    kv = bench.scheduler.kv
    kv.swap.swap_in(b)
    kv.free(b)
    taken = {block.block_id for block in kv.block_pool.get_new_blocks(4)}
    assert len(taken) == 4, "all there are"
    assert kv.swap.take_moves()[1] == []


def test_an_evicted_prefix_is_demoted_and_promoted(make_swap):
    bench = make_swap(num_blocks=6)
    prompt = [7] * 33
    for name, tokens in (("a", prompt), ("b", [8] * 75), ("c", prompt)):
        request = bench.add(name, tokens, max_tokens=1)
        moved = []
        while bench.scheduler.requests:
            bench.step()
            moved += bench.last.swap_in
    assert request.num_cached_tokens == request.num_promoted_tokens == 32
    assert len(moved) == 2


def test_what_could_not_be_read_is_not_read_again(make_swap):
    """The request computes it again; if it were still found, that would read it once more."""
    bench = make_swap(num_blocks=6)
    prompt = [7] * 33
    for name, tokens in (("a", prompt), ("b", [8] * 75)):
        bench.add(name, tokens, max_tokens=1)
        bench.drain()
    scheduler = bench.scheduler
    c = bench.add("c", prompt, max_tokens=1)
    batch = scheduler.schedule()
    (_, first), (_, second) = batch.swap_in
    outputs = scheduler.update(batch, BatchResult({"c": [1000]}, unread=[first]))
    assert outputs == [] and c.num_preemptions == 1
    scheduler.check_integrity()
    bench.step()
    assert bench.last.swap_in == [] and bench.scheduled == {"c": 33}
    assert bench.tokens["c"] == [1000]


def test_who_shares_what_could_not_be_read_computes_it_again(make_swap):
    """Two requests are swapped out to the same blocks of the tier."""
    bench = make_swap(num_blocks=9)
    bench.add("a", [5] * 47, max_tokens=30)
    b, c = (bench.add(name, [6] * 47, max_tokens=40) for name in "bc")
    kv = bench.scheduler.kv
    run_until(bench, lambda: kv.swap.num_swapped == 2)
    while not (batch := bench.scheduler.schedule()).swap_in:
        bench.scheduler.update(batch, BatchResult({n: [7] for n in batch.num_scheduled_tokens}))
    bad = [dst for _, dst in batch.swap_in]
    bench.scheduler.update(batch, BatchResult({}, unread=bad))
    assert kv.swap.num_swapped == 0, "one of them would have read it, too"
    assert not kv.swap.num_tokens_of(b.request_id) and not kv.swap.num_tokens_of(c.request_id)
    bench.scheduler.check_integrity()


def test_hits_in_both_tiers_are_joined(make_swap):
    bench = make_swap(num_blocks=6)
    prompt = [*range(60)]
    bench.add("a", prompt, max_tokens=1)
    bench.drain()
    # One full block is taken, from the tail of the chain.
    bench.add("b", [8] * 40, max_tokens=1)
    bench.drain()
    pool = bench.scheduler.kv.block_pool
    hashes = bench.add("c", prompt, max_tokens=1)
    bench.step()
    assert hashes.num_cached_tokens == 48
    assert hashes.num_promoted_tokens == 16, "two blocks were in the pool"
    assert len(bench.last.swap_in) == 1
    assert pool.get_num_free_blocks() == 5


def test_what_cannot_be_written_is_recomputed(make_swap, caplog):
    bench = make_swap(num_blocks=5, caching=False)
    bench.add("a", [5] * 31, max_tokens=20)
    b = bench.add("b", [6] * 31, max_tokens=30)
    scheduler = bench.scheduler
    while not b.num_preemptions:
        batch = scheduler.schedule()
        sampled = {
            i: [1000 + scheduler.requests[i].num_output_tokens] for i in batch.num_scheduled_tokens
        }
        result = BatchResult(sampled, unwritten=[dst for _, dst in batch.swap_out])
        for output in scheduler.update(batch, result):
            bench.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert scheduler.kv.swap.num_swapped == 0
    assert scheduler.make_stats(batch, result, []).num_swap_failures == 2
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1
    bench.drain()
    assert bench.tokens["b"] == [1000 + i for i in range(30)]
    assert scheduler.kv.swap.is_closed, "nothing more is written"


def test_a_block_of_the_tier_is_written_once_in_a_step(make_swap):
    bench = make_swap(swap=1, num_blocks=6)
    bench.add("a", [7] * 33, max_tokens=1)
    bench.drain()
    bench.add("b", [8] * 75, max_tokens=1)
    bench.step()
    assert len(bench.last.swap_out) == 1, "two are evicted, one finds room"
    bench.drain()


def test_what_was_not_written_is_not_found(make_swap):
    bench = make_swap(num_blocks=6)
    bench.add("a", [7] * 33, max_tokens=1)
    bench.drain()
    bench.add("b", [8] * 75, max_tokens=1)
    batch = bench.scheduler.schedule()
    assert len(batch.swap_out) == 2
    unwritten = [dst for _, dst in batch.swap_out]
    bench.scheduler.update(batch, BatchResult({"b": [1]}, unwritten=unwritten))
    request = bench.add("c", [7] * 33, max_tokens=1)
    bench.drain()
    assert request.num_cached_tokens == 0


def test_the_record_of_a_swap(make_swap):
    bench = make_swap(num_blocks=5, caching=False)
    bench.add("a", [5] * 31, max_tokens=4)
    b = bench.add("b", [6] * 31, max_tokens=6)
    run_until(bench, lambda: b.num_preemptions)
    stats = bench.scheduler.make_stats(bench.last, BatchResult({}), [])
    [fact] = [f for f in unpack(stats.facts) if f.kind == FactKind.PREEMPTED]
    assert (fact.a, fact.b, fact.c) == (32, 2, 1)
    assert (stats.num_swapped, stats.num_blocks_swapped_out) == (1, 2)
    assert stats.swap_usage == 0.02
    bench.drain()
    stats = bench.scheduler.make_stats(bench.last, BatchResult({}), [])
    back = [f for f in unpack(stats.facts) if f.kind == FactKind.ADMITTED][-1]
    assert (back.reason, back.b) == (2, 32)


@pytest.mark.parametrize(
    "asked", [{"prompt_logprobs": 1}, {"prompt_logprob_token_ids": [[1]] * 39}], ids=str
)
def test_prompt_scores_are_not_swapped_away(make_swap, asked):
    """The worker forgets what it has scored of a preempted prompt."""
    bench = make_swap(num_blocks=5, caching=False, budget=20, scheduler_reserve_full_isl=False)
    bench.add("a", [5] * 31, max_tokens=30)
    b = bench.add("b", [6] * 40, max_tokens=2, **asked)
    run_until(bench, lambda: b.num_preemptions)
    assert bench.scheduler.kv.swap.num_swapped == 0


@pytest.mark.parametrize(
    "mode, per_token, per_block, expected",
    [
        ("auto", 1.0, 1.0, True),
        ("auto", 1.0, 7.0, True),
        ("auto", 1.0, 9.0, False),
        ("auto", 1.0, 0.0, True),
        ("swap", 1.0, 9.0, True),
        ("recompute", 1.0, 0.0, False),
    ],
)
def test_the_cheaper_way_is_taken(mode, per_token, per_block, expected):
    cost = SwapCost(mode)
    cost.seconds_per_token, cost.seconds_per_block = per_token, per_block
    assert cost.prefers_swap(num_tokens=32, num_blocks=2) is expected


def test_costs_are_learnt_from_steps(make_swap):
    bench = make_swap(num_blocks=5, caching=False)
    bench.add("a", [5] * 31, max_tokens=20)
    scheduler = bench.scheduler
    batch = scheduler.schedule()
    scheduler.update(batch, BatchResult({"a": [1]}, forward_seconds=3.1))
    assert scheduler.books.swap_cost.seconds_per_token == pytest.approx(0.1)
    batch = scheduler.schedule()
    scheduler.update(batch, BatchResult({"a": [1]}, forward_seconds=5.0))
    assert scheduler.books.swap_cost.seconds_per_token == pytest.approx(0.1), (
        "a decode is no measure"
    )


def test_the_tier_gives_up_the_least_recently_used():
    tier = HostTier(2)
    first, second = tier.take((0, b"a")), tier.take((0, b"b"))
    assert tier.take((0, b"c")) is None, "both are pinned"
    tier.unpin([first, second])
    assert tier.find((0, b"a")) == first
    assert tier.take((0, b"c")) == second
    assert tier.find((0, b"a")) == first and tier.find((0, b"b")) is None
    tier.check_integrity({second: 1})
