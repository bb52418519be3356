"""Prefix reuse to the token: the beginning of a block is copied instead of computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.core.kv.manager import MIN_COPIED_TOKENS
from quire.core.request import Request, RequestStatus
from quire.params import SamplingParams

Make = Callable[..., Any]


def finish(bench: Any) -> None:
    while bench.scheduler.requests:
        bench.step()


def test_a_short_prompt_repeated_hits_without_a_full_block(make: Make) -> None:
    """A demonstration from vLLM guides: nine tokens, three times, blocks of sixteen."""
    bench = make(block_size=16)
    cached = []
    for name in "abc":
        request = bench.add(name, 9, max_tokens=2)
        finish(bench)
        cached.append(request.num_cached_tokens)
    assert cached == [0, 8, 8]


def test_only_the_common_tokens_are_copied(make: Make) -> None:
    bench = make(block_size=16)
    bench.add("a", [*range(20), 7, 7, 7, 7], max_tokens=1)
    finish(bench)
    other = bench.add("b", [*range(20), 8, 8], max_tokens=1)
    bench.step()
    assert other.num_cached_tokens == 20
    assert [count for _, _, count in bench.last.block_copies] == [4]


def test_the_best_of_several_is_taken(make: Make) -> None:
    bench = make(block_size=16)
    for name, prompt in (("a", [1, 2, 3, 4, 5, 6, 9]), ("b", [1, 2, 3, 4, 5, 6, 7, 8, 9])):
        bench.add(name, prompt, max_tokens=1)
        finish(bench)
    bench.add("other", [5, 5, 5, 5, 5, 5], max_tokens=1)
    finish(bench)
    request = bench.add("c", [1, 2, 3, 4, 5, 6, 7, 8, 8, 8], max_tokens=1)
    bench.step()
    assert request.num_cached_tokens == 8


def test_few_tokens_are_computed_again(make: Make) -> None:
    bench = make(block_size=16)
    few = MIN_COPIED_TOKENS - 1
    bench.add("a", [1] * few + [2] * 5, max_tokens=1)
    finish(bench)
    request = bench.add("b", [1] * few + [3] * 5, max_tokens=1)
    bench.step()
    assert request.num_cached_tokens == 0
    assert bench.last.block_copies == []


def test_what_this_step_computes_is_not_copied(make: Make) -> None:
    bench = make(block_size=8)
    bench.add("a", 12)
    bench.add("b", [*range(1, 7), 99, 99, 99])
    bench.step()
    assert bench.scheduled == {"a": 12, "b": 9}
    late = bench.add("c", [*range(1, 7), 98])
    bench.step()
    assert late.num_cached_tokens == 6


def test_a_salt_separates_partial_blocks_too(make: Make) -> None:
    bench = make(block_size=16)
    bench.add("a", 9, max_tokens=1, salt="x")
    finish(bench)
    other = bench.add("b", 9, max_tokens=1)
    same = bench.add("c", 9, max_tokens=1, salt="x")
    bench.step()
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 8)


def test_a_failed_requests_tail_is_not_copied(make: Make) -> None:
    bench = make(block_size=16)
    bench.add("bad", 9, max_tokens=5)
    bench.step(failed={"bad": "injected"})
    again = bench.add("again", 9, max_tokens=1)
    bench.step()
    assert again.num_cached_tokens == 0


def test_an_aborted_prompt_leaves_what_it_computed(make: Make) -> None:
    bench = make(block_size=16, budget=10)
    bench.add("a", 30)
    bench.step()
    bench.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    again = bench.add("b", 30)
    bench.step()
    assert again.num_cached_tokens == 10


def test_an_evicted_tail_is_forgotten(make: Make) -> None:
    bench = make(num_blocks=3, block_size=16)
    bench.add("a", 9, max_tokens=1)
    finish(bench)
    bench.add("big", [7] * 30, max_tokens=1)
    finish(bench)
    again = bench.add("b", 9, max_tokens=1)
    bench.step()
    assert again.num_cached_tokens == 0


def explain(bench: Any, tokens: list[int], salt: str | None = None) -> Any:
    return bench.scheduler.kv.explain_prefix(Request("", tokens, SamplingParams(), cache_salt=salt))


def test_why_a_prefix_missed(make: Make) -> None:
    bench = make(block_size=8)
    bench.add("a", list(range(100, 122)), max_tokens=1)
    finish(bench)
    changed = [*range(100, 110), 5, *range(111, 122)]
    answer = explain(bench, changed)
    assert (answer.num_cached_tokens, answer.block_index, answer.first_difference) == (8, 1, 10)
    assert (answer.cached_token_id, answer.given_token_id) == (110, 5)
    whole = explain(bench, list(range(100, 122)))
    assert (whole.num_cached_tokens, whole.first_difference) == (21, None)
    nothing = explain(bench, list(range(100, 122)), salt="other")
    assert (nothing.num_cached_tokens, nothing.block_index, nothing.first_difference) == (
        0,
        0,
        None,
    )
    at_once = explain(bench, [1, 2, 3])
    assert (at_once.first_difference, at_once.cached_token_id) == (None, None)
