"""Groups of layers: how they are formed, what they hit and hold, against brute force."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from quire.config.kv_groups import (
    KVGroup,
    blocks_per_request,
    form_groups,
    most_blocks,
    num_unseen_blocks,
    page_bytes,
)
from quire.config.scheduler import SchedulerConfig
from quire.config.shape import LayerKV
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.params import SamplingParams
from quire.utils.timing import ManualClock

WINDOWS = st.sampled_from([(None,), (5,), (None, 5), (None, None, 9, 9), (12, 4), (None, 1)])


def layers(*windows: int | None) -> list[LayerKV]:
    return [LayerKV(2, 16, 16, window) for window in windows]


# ---- forming -----------------------------------------------------------------------------------


def test_layers_alike_are_one_group() -> None:
    assert form_groups(layers(None, None, None)) == (KVGroup((0, 1, 2)),)
    assert form_groups(layers(8, 8)) == (KVGroup((0, 1), 8),)


def test_groups_are_as_deep_as_the_smallest_kind() -> None:
    gemma = layers(*[8, 8, 8, 8, 8, None] * 2)
    groups = form_groups(gemma)
    assert [group.window for group in groups] == [None, 8, 8, 8, 8, 8]
    assert groups[0].layers == (5, 11)
    assert {len(group.layers) for group in groups} == {2}
    assert page_bytes(gemma, groups, 16, 2) == page_bytes(gemma[:2], form_groups(gemma[:2]), 16, 2)


def test_nearly_equal_kinds_are_one_group_each() -> None:
    groups = form_groups(layers(8, None, 8, None, 8, None, 8, None, 8))
    assert [len(group.layers) for group in groups] == [4, 5]


@given(st.lists(st.sampled_from([None, 4, 8]), min_size=1, max_size=40), st.booleans())
def test_every_layer_is_in_one_group_of_its_window(windows: list[int | None], hybrid: bool) -> None:
    groups = form_groups(layers(*windows), hybrid)
    assert sorted(i for group in groups for i in group.layers) == list(range(len(windows)))
    depth = max(len(group.layers) for group in groups)
    for group in groups:
        assert group.layers and list(group.layers) == sorted(group.layers)
        if hybrid:
            assert {windows[i] for i in group.layers} == {group.window}
    if hybrid:
        waste = len(groups) * depth - len(windows)
        assert waste < depth * len(set(windows)), "pages stand empty"
    else:
        assert groups == (KVGroup(tuple(range(len(windows)))),)


def test_layers_of_different_sizes_keep_everything() -> None:
    mixed = [LayerKV(2, 16, 16), LayerKV(4, 16, 16, 8)]
    assert form_groups(mixed) == (KVGroup((0, 1)),)
    same_numbers = [LayerKV(2, 32, 32), LayerKV(4, 16, 16, 8)]
    assert len(form_groups(same_numbers)) == 2


@given(st.integers(1, 40), st.integers(0, 200), st.sampled_from([4, 8]))
def test_a_block_is_unseen_once_no_later_token_sees_its_end(
    window: int, computed: int, size: int
) -> None:
    first_seen = computed - window + 1  # by the next token, at position `computed`
    unseen = [index for index in range(200) if (index + 1) * size - 1 < first_seen]
    assert num_unseen_blocks(window, computed, size) == len(unseen)
    assert num_unseen_blocks(None, computed, size) == 0


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 200), st.sampled_from([4, 8]))
def test_no_step_holds_more_than_was_reckoned(
    window: int, chunk: int, length: int, size: int
) -> None:
    most, computed = 0, 0
    while computed < length:
        end = min(computed + chunk, length)
        most = max(most, -(-end // size) - num_unseen_blocks(window, computed, size))
        computed += random.Random(computed).randint(1, end - computed)
    assert most <= most_blocks(window, length, chunk, size)


# ---- hits --------------------------------------------------------------------------------------


def naive_hit(kv: KVCacheManager, request: Request) -> int:
    """Blocks of the longest prefix from which every group can go on."""
    size = kv.block_size

    def cached(group: int, index: int) -> bool:
        return kv.block_pool.get_cached_block(request.block_hashes[index], group) is not None

    def serves(end: int) -> bool:
        return all(
            cached(group, index)
            for group, window in enumerate(kv.windows)
            for index in range(end)
            # its last token is seen by the first token after `end` blocks
            if window is None or (index + 1) * size - 1 > end * size - window
        )

    return max(end for end in range((request.num_tokens - 1) // size + 1) if serves(end))


# What a random generator gave does not get simpler by shrinking.
@settings(max_examples=60, phases=(Phase.explicit, Phase.reuse, Phase.generate), deadline=None)
@given(WINDOWS, st.randoms(use_true_random=False))
def test_hits_are_the_longest_by_brute_force(
    windows: tuple[int | None, ...], rng: random.Random
) -> None:
    size = 4
    kv = KVCacheManager(rng.randint(20, 60), size, True, 64, windows, 16)
    alive: list[Request] = []
    for number in range(40):
        for request in rng.sample(alive, rng.randint(0, len(alive))):
            kv.begin_step()
            room = request.num_tokens - request.num_computed_tokens
            count = rng.randint(1, min(room, 16)) if room else 0
            if not count or kv.allocate_slots(request, count) is None:
                kv.free(request)
                alive.remove(request)
            else:
                request.num_computed_tokens += count
            kv.check_integrity()
        prompt = [rng.randint(0, 1)] * rng.randint(1, 40) + [number] * rng.randint(0, 9)
        request = Request(f"r{number}", prompt, SamplingParams())
        hits, num_hit = kv.get_computed_blocks(request)
        assert num_hit == naive_hit(kv, request) * size
        for group, window in enumerate(windows):
            unseen = num_unseen_blocks(window, num_hit, size)
            assert [b.is_null for b in hits[group]] == [
                index < unseen for index in range(num_hit // size)
            ]
            for block, block_hash in zip(hits[group], request.block_hashes, strict=False):
                assert block.is_null or block.block_hash == block_hash
        sources, copied = kv.find_partial_block(request, num_hit)
        new = min(request.num_tokens - num_hit - copied, 16)
        lacking = kv.lacking_blocks(num_hit + copied + new, hits)
        allocated = kv.allocate_slots(request, new, hits, copied)
        assert (allocated is None) == (lacking > 0)
        if allocated is not None:
            request.num_computed_tokens = num_hit + copied + new
            alive.append(request)
        kv.check_integrity()
    for request in alive:
        kv.free(request)
    kv.check_integrity()
    assert kv.usage == 0.0


def test_a_window_needs_only_the_blocks_before_the_end() -> None:
    """The head of the windowed group is evicted; the prefix is still a hit."""
    kv = KVCacheManager(40, 4, True, 64, (None, 5), 64)
    first = Request("a", list(range(30)), SamplingParams())
    kv.allocate_slots(first, 30)
    first.num_computed_tokens = 30
    kv.free(first)
    for block_hash in first.block_hashes[:5]:
        kv.block_pool.uncache_all(block_hash, group=1)
    again = Request("b", list(range(30)), SamplingParams())
    hits, num_hit = kv.get_computed_blocks(again)
    assert num_hit == 28
    assert [block.is_null for block in hits[1]] == [True] * 6 + [False]
    kv.block_pool.uncache_all(first.block_hashes[6], group=1)
    assert kv.get_computed_blocks(again)[1] == 24, "one block earlier it can go on, too"
    kv.block_pool.uncache_all(first.block_hashes[5], group=1)
    assert kv.get_computed_blocks(again)[1] == 0


# ---- through the scheduler -----------------------------------------------------------------------

Make = Callable[..., Any]


@pytest.fixture
def make_hybrid(make: Make) -> Make:
    def build(
        windows: tuple[int | None, ...],
        num_blocks: int = 200,
        budget: int = 64,
        swap_blocks: int = 0,
    ) -> Any:
        bench = make(budget=budget)
        kv = KVCacheManager(num_blocks, 16, True, 8192, windows, budget, swap_blocks)
        limits = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=8)
        bench.scheduler = Scheduler(limits, kv, max_model_len=8192, clock=ManualClock())
        return bench

    return build


def test_a_long_request_holds_only_its_window(make_hybrid: Make) -> None:
    bench = make_hybrid((None, 32, 32))
    bench.add("a", 1000, max_tokens=100)
    most = 0
    while bench.scheduler.requests:
        bench.step()
        most = max(most, bench.scheduler.kv.num_blocks_of("a"))
    windowed = most_blocks(32, 1100, 64, 16)
    assert most <= 69 + 2 * windowed == blocks_per_request((None, 32, 32), 1100, 64, 16)
    assert windowed < 69 / 8


def test_what_left_the_window_of_a_failed_request_is_distrusted(make_hybrid: Make) -> None:
    bench = make_hybrid((16,))
    bench.add("bad", 200)
    bench.step()
    bench.step()
    bench.step()
    hashes = bench.scheduler.requests["bad"].block_hashes
    assert bench.scheduler.kv.block_pool.get_cached_block(hashes[0]) is not None
    bench.step(failed={"bad": "injected"})
    found = [bench.scheduler.kv.block_pool.get_cached_block(h) for h in hashes]
    assert found == [None] * len(found)


def test_what_left_the_window_for_the_second_tier_is_distrusted_there(make_hybrid: Make) -> None:
    """The request holds it no longer, and the pool has it no longer: only the tier finds it."""
    bench = make_hybrid((None, 16), num_blocks=14, budget=32, swap_blocks=50)
    bench.add("bad", list(range(100, 200)))
    for _ in range(3):
        bench.step()
    bench.add("other", 40)
    hashes = bench.scheduler.requests["bad"].block_hashes
    bench.step()
    tier = bench.scheduler.kv.swap._tier
    assert [key for h in hashes if tier.find(key := (1, h)) is not None] == [(1, hashes[0])]
    bench.step(failed={"bad": "injected"})
    assert [h for h in hashes if tier.find((1, h)) is not None] == []


def test_a_partial_hit_copies_in_every_group(make_hybrid: Make) -> None:
    bench = make_hybrid((None, 32))
    bench.add("a", 40, max_tokens=2)
    bench.drain()
    again = bench.add("b", [*range(1, 39), 7, 7], max_tokens=2)
    bench.step()
    assert again.num_cached_tokens == 38
    tables = bench.scheduler.kv.get_block_ids("b")
    assert [(dst, n) for _, dst, n in bench.last.block_copies] == [(t[2], 6) for t in tables]
    bench.drain()


def test_capacity_is_the_longest_request_that_fits() -> None:
    for windows in ((None,), (None, 20), (20,), (None, None, 7)):
        kv = KVCacheManager(30, 8, True, 10_000, windows, 32)
        length = kv.capacity_tokens
        if windows == (20,):
            assert length >= 10_000, "a window alone holds any length"
            continue
        assert blocks_per_request(windows, length, 32, 8) <= 29
        assert blocks_per_request(windows, length + 1, 32, 8) > 29
