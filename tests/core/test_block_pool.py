"""Exact block ids and eviction order."""

from __future__ import annotations

import pytest

from quire.core.block_hash import extend_block_hashes, hash_prefix
from quire.core.kv.manager import KVCacheManager
from quire.core.kv.pool import BlockPool
from quire.core.request import Request
from quire.params import SamplingParams


def request(name: str, tokens: list[int], salt: str | None = None) -> Request:
    return Request(name, tokens, SamplingParams(), cache_salt=salt)


def free_ids(pool: BlockPool) -> list[int]:
    return [b.block_id for b in pool._free]


def test_blocks_are_handed_out_in_order_and_zero_never() -> None:
    pool = BlockPool(5)
    assert [b.block_id for b in pool.get_new_blocks(4)] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="1 KV blocks wanted, 0 free"):
        pool.get_new_blocks(1)


def test_cached_blocks_go_right_tail_first_empty_ones_go_left() -> None:
    kv = KVCacheManager(8, block_size=4)
    a = request("a", list(range(10)))  # blocks 1, 2 full, 3 half full
    kv.allocate_slots(a, 10)
    assert kv.get_block_ids("a") == ([1, 2, 3],)
    kv.free(a)
    # 3 holds nothing to find: reused first. Then never used ones. Then 2 before 1: tail first.
    assert free_ids(kv.block_pool) == [3, 4, 5, 6, 7, 2, 1]


def test_eviction_is_least_recently_released_first() -> None:
    kv = KVCacheManager(5, block_size=4)
    for name, start in (("a", 0), ("b", 100)):
        r = request(name, list(range(start, start + 8)))
        kv.allocate_slots(r, 8)
        kv.free(r)
    # never-used blocks 3 and 4 went to b before anything cached was evicted
    assert free_ids(kv.block_pool) == [2, 1, 4, 3]
    c = request("c", list(range(200, 208)))
    kv.allocate_slots(c, 8)
    assert kv.get_block_ids("c") == ([2, 1],)
    assert kv.block_pool.num_evicted == 2
    probe = request("p", list(range(100, 109)))
    assert [b.block_id for b in kv.get_computed_blocks(probe)[0][0]] == [3, 4]
    assert kv.get_computed_blocks(request("q", list(range(9))))[1] == 0


def test_a_hit_on_a_free_block_leaves_the_free_queue() -> None:
    kv = KVCacheManager(8, block_size=4)
    a = request("a", list(range(9)))
    kv.allocate_slots(a, 9)
    kv.free(a)
    b = request("b", list(range(9)))
    hits, num = kv.get_computed_blocks(b)
    assert num == 8
    free_before = kv.block_pool.get_num_free_blocks()
    kv.allocate_slots(b, 1, hits)
    assert kv.get_block_ids("b") == ([1, 2, 3],)
    assert kv.block_pool.get_num_free_blocks() == free_before - 3


def test_hits_that_are_free_count_against_the_free_blocks() -> None:
    """Two free cached blocks are hit and two more are needed, but only three are free in all."""
    kv = KVCacheManager(4, block_size=4)
    a = request("a", list(range(8)))
    kv.allocate_slots(a, 8)
    kv.free(a)
    b = request("b", list(range(16)))
    hits, num = kv.get_computed_blocks(b)
    assert num == 8
    assert kv.allocate_slots(b, 8, hits) is None
    kv.check_integrity()
    assert kv.get_block_ids("b") == ()


def test_shared_blocks_are_freed_by_the_last_holder() -> None:
    kv = KVCacheManager(8, block_size=4)
    a, b = request("a", list(range(9))), request("b", list(range(9)))
    kv.allocate_slots(a, 9)
    hits, _ = kv.get_computed_blocks(b)
    kv.allocate_slots(b, 1, hits)
    kv.free(a)
    kv.check_integrity()
    assert {1, 2}.isdisjoint(free_ids(kv.block_pool))
    kv.free(b)
    kv.check_integrity()
    assert kv.usage == 0.0


def test_reset_is_refused_while_blocks_are_held() -> None:
    kv = KVCacheManager(8, block_size=4)
    a = request("a", list(range(9)))
    kv.allocate_slots(a, 9)
    assert kv.reset_prefix_cache() is False
    kv.free(a)
    assert kv.reset_prefix_cache() is True
    assert kv.get_computed_blocks(request("b", list(range(9))))[1] == 0
    kv.check_integrity()


def test_hashes_are_chained_and_salted() -> None:
    a, b, c = (request(n, [1, 2, 3, 4] * 2, s) for n, s in (("a", None), ("b", "s"), ("c", "s")))
    for r in (a, b, c):
        extend_block_hashes(r, 4)
    assert len(a.block_hashes) == 2
    assert a.block_hashes[0] != a.block_hashes[1], "equal tokens, different prefix"
    assert not set(a.block_hashes) & set(b.block_hashes), "the salt spreads by chaining"
    assert b.block_hashes == c.block_hashes


def test_hash_inputs_cannot_run_into_each_other() -> None:
    assert hash_prefix([1, 2], b"ab") != hash_prefix([1, 2], b"a")
    assert hash_prefix([2, 3], b"") != hash_prefix([3], (2).to_bytes(4, "little"))
    assert hash_prefix([1, 2]) != hash_prefix([1, 2, 0])


def test_integrity_check_sees_a_lost_reference() -> None:
    kv = KVCacheManager(8, block_size=4)
    a = request("a", list(range(9)))
    kv.allocate_slots(a, 9)
    kv.block_pool.blocks[1].ref_cnt += 1
    with pytest.raises(AssertionError, match="tables hold it"):
        kv.check_integrity()


@pytest.mark.parametrize("link", ["next_free", "prev_free"])
def test_integrity_check_ends_however_the_free_queue_is_linked(link: str) -> None:
    """A ring would be walked for ever."""
    kv = KVCacheManager(8)
    blocks = kv.block_pool.blocks
    setattr(blocks[5], link, blocks[5 - 2] if link == "next_free" else blocks[5 + 2])
    with pytest.raises(AssertionError, match="the free queue is broken"):
        kv.check_integrity()
