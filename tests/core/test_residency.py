"""How long cached content stays in its block, on a clock that is set by hand."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.batch import BatchResult
from quire.core.kv.residency import MAX_GAPS, BlockResidency


@pytest.fixture
def followed(make: Any) -> Any:
    """A bench whose blocks are all followed."""

    def build(sample: float = 1.0, **options: Any) -> Any:
        bench = make(**options)
        pool = bench.scheduler.kv.block_pool
        pool.residency = BlockResidency(sample, bench.scheduler.clock)
        return bench

    return build


def run(bench: Any, name: str, tokens: list[int], seconds: float = 0.0, later: float = 0.0) -> None:
    """One request, `seconds` in its only step; then time passes."""
    bench.add(name, tokens, max_tokens=1)
    batch = bench.scheduler.schedule()
    bench.wait(seconds)
    (request_id,) = batch.num_scheduled_tokens
    bench.scheduler.update(batch, BatchResult({request_id: [1]}))
    bench.wait(later)


def test_lifetime_idle_time_and_gaps(followed: Any) -> None:
    bench = followed(num_blocks=4)
    kv = bench.scheduler.kv
    first, other = [5] * 33, [6] * 33
    run(bench, "a", first, seconds=2.0, later=1.0)  # taken at 0, released at 2
    run(bench, "b", first, seconds=0.5, later=4.0)  # found at 3, released at 3.5
    run(bench, "c", first, seconds=0.5, later=2.0)  # found at 7.5, released at 8
    assert kv.take_stays() == [], "nothing is given up yet"
    run(bench, "d", other)  # at 10 it takes all three blocks
    stays = sorted(kv.take_stays())
    # Two whole blocks were found again and again; the third held the last token of each.
    assert [stay for stay in stays if stay[2]] == [(10.0, 2.0, [3.0, 4.5])] * 2
    assert kv.take_stays() == [], "told once"


def test_content_that_nobody_could_find_has_no_stay(followed: Any) -> None:
    bench = followed(num_blocks=4, caching=False)
    for name in "abc":
        run(bench, name, [ord(name)] * 33, later=1.0)
    assert bench.scheduler.kv.take_stays() == []


def test_a_sample_is_a_share_of_the_blocks(followed: Any) -> None:
    bench = followed(sample=0.1, num_blocks=101)
    for number in range(200):
        run(bench, f"r{number}", [number] * 160)
    evicted = bench.scheduler.kv.block_pool.num_evicted
    told = len(bench.scheduler.kv.take_stays())
    assert evicted > 1800 and 0.07 < told / evicted < 0.13


def test_gaps_are_bounded(followed: Any) -> None:
    bench = followed(num_blocks=6)
    for number in range(3 * MAX_GAPS):
        run(bench, f"r{number}", [5] * 33, later=1.0)
    run(bench, "other", [6] * 70)
    stays = bench.scheduler.kv.take_stays()
    assert max(len(gaps) for _, _, gaps in stays) == MAX_GAPS


def test_without_it_nothing_is_followed(make: Any) -> None:
    bench = make(num_blocks=4)
    for name in "ab":
        run(bench, name, [ord(name)] * 33)
    assert bench.scheduler.kv.take_stays() == []
