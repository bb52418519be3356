"""What was evicted and asked for again is told from what was never there."""

from __future__ import annotations

from quire.core.kv.evicted import EvictedContent
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request
from quire.params import SamplingParams


def run(kv: KVCacheManager, name: str, tokens: list[int]) -> int:
    """A request from beginning to end; how many blocks it missed."""
    before = kv.block_pool.num_missed
    request = Request(name, tokens, SamplingParams())
    kv.begin_step()
    prefix = kv.find_prefix(request)
    kv.admit(request, prefix, request.num_tokens - prefix.num_tokens)
    request.num_computed_tokens = request.num_tokens
    kv.begin_step()
    kv.free(request)
    return kv.block_pool.num_missed - before


def test_only_what_comes_back_is_missed() -> None:
    kv = KVCacheManager(7, block_size=4)
    first, other = list(range(17)), list(range(100, 117))
    assert run(kv, "a", first) == 0, "never seen"
    assert run(kv, "b", other) == 0, "evicts most of the first, and that is no loss"
    assert kv.block_pool.num_evicted == 3
    assert run(kv, "c", first) == 3
    assert run(kv, "d", first) == 0, "it is there again"
    assert run(kv, "e", list(range(200, 217))) == 0


def test_a_request_that_comes_back_itself_misses_nothing() -> None:
    """What a preemption cost is counted as computed again."""
    kv = KVCacheManager(7, block_size=4)
    run(kv, "a", list(range(17)))
    run(kv, "b", list(range(100, 117)))
    request = Request("c", list(range(17)), SamplingParams())
    request.num_preemptions = 1
    kv.begin_step()
    kv.admit(request, kv.find_prefix(request), 4)
    assert kv.block_pool.num_missed == 0


def test_a_reset_forgets() -> None:
    kv = KVCacheManager(7, block_size=4)
    run(kv, "a", list(range(17)))
    run(kv, "b", list(range(100, 117)))
    assert kv.reset_prefix_cache()
    assert run(kv, "c", list(range(17))) == 0


def test_no_more_is_remembered_than_the_pool_could_hold() -> None:
    evicted = EvictedContent(num_blocks=8)
    hashes = [bytes([i]) for i in range(20)]
    for block_hash in hashes:
        evicted.add(block_hash)
    known = [h for h in hashes if evicted.count_run([h])]
    assert known == hashes[-len(known) :] and 4 <= len(known) <= 8
    assert evicted.count_run(hashes[-2:]) == 2
    assert evicted.count_run([hashes[-1], b"never", hashes[-2]]) == 1
