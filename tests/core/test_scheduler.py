"""The V1 rules, told as short stories with exact numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from quire.core.request import RequestStatus

Make = Callable[..., Any]


def test_the_tracing_documents_example(make: Make) -> None:
    """Budget 2048, prompts of 50 and 5000 tokens, the short one first."""
    bench = make(budget=2048)
    bench.add("short", [7] * 50, max_tokens=16)
    bench.add("long", [9] * 5000, max_tokens=16)
    steps = []
    for _ in range(3):
        bench.step()
        steps.append(dict(bench.scheduled))
    assert steps == [
        {"short": 50, "long": 1998},
        {"short": 1, "long": 2047},
        {"short": 1, "long": 955},
    ]


def test_the_same_example_with_the_long_prompt_first(make: Make) -> None:
    bench = make(budget=2048)
    bench.add("long", [9] * 5000, max_tokens=16)
    bench.add("short", [7] * 50, max_tokens=16)
    steps = []
    for _ in range(3):
        bench.step()
        steps.append(dict(bench.scheduled))
    assert steps == [{"long": 2048}, {"long": 2048}, {"long": 904, "short": 50}]


def test_blocks_are_taken_only_at_boundaries(make: Make) -> None:
    bench = make(block_size=16)
    bench.add("a", 31, max_tokens=4)
    bench.step()
    assert bench.blocks("a") == [1, 2]
    bench.step()  # computes token 32: still inside block 2
    assert bench.blocks("a") == [1, 2]
    bench.step()  # token 33 opens block 3
    assert bench.blocks("a") == [1, 2, 3]
    assert bench.last.scheduled_cached_reqs.new_block_ids == [([3],)]


def test_a_decode_step_has_one_token_per_running_request(make: Make) -> None:
    bench = make()
    for i in range(5):
        bench.add(f"r{i}", [i] * (10 + i), max_tokens=8)
    bench.step()
    bench.step()
    assert bench.scheduled == {f"r{i}": 1 for i in range(5)}


def test_more_than_the_token_is_told_about_the_first_output_and_the_last(make: Make) -> None:
    bench = make()
    bench.wait(5.0)
    bench.add("a", 20, max_tokens=5)
    told = [bench.step()[0] for _ in range(5)]
    assert [o.queued_ts for o in told] == [5.0, 0.0, 0.0, 0.0, 5.0]
    assert [o.finish_reason is not None for o in told] == [False] * 4 + [True]


@pytest.mark.parametrize("steps", [1, 2, 12])
def test_a_request_whose_sample_is_not_back_gets_nothing(make: Make, steps: int) -> None:
    """Quiet decodes and others: the step after the first, and the one that ends a block."""
    bench = make()
    bench.add("a", 20, max_tokens=99)
    for _ in range(steps):
        bench.step()
    scheduler = bench.scheduler
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}
    assert not any(scheduler.schedule().num_scheduled_tokens.values())
    scheduler.check_integrity()


def test_prefix_hit_is_capped_at_the_last_token(make: Make) -> None:
    """An aligned prompt of N full blocks hits N - 1; of the last, all but one token are copied."""
    bench = make(block_size=16)
    first = bench.add("a", 48, max_tokens=1)
    bench.step()
    second = bench.add("b", 48, max_tokens=1)
    bench.step()
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 47
    assert bench.scheduled == {"b": 1}
    (new,) = bench.last.scheduled_new_reqs
    assert new.block_ids == ([1, 2, 4],)
    assert bench.last.block_copies == [(3, 4, 15)]


def test_requests_of_one_step_share_a_prefix(make: Make) -> None:
    """Blocks are registered when they are allocated, so the second of two equal prompts that
    arrive together shares the first one's blocks."""
    bench = make(block_size=16)
    bench.add("a", 40)
    bench.add("b", 40)
    bench.step()
    assert bench.scheduled == {"a": 40, "b": 8}
    assert bench.blocks("a") == [1, 2, 3]
    assert bench.blocks("b") == [1, 2, 4]
    assert bench.last.prefix_queries == 80
    assert sum(found for _, found in bench.last.prefix_lookups) == bench.last.prefix_hits
    assert bench.last.prefix_hits == 32


def test_a_salt_separates_equal_prompts(make: Make) -> None:
    bench = make()
    bench.add("a", 40, salt="x")
    bench.add("b", 40, salt="y")
    bench.add("c", 40, salt="x")
    bench.step()
    assert bench.scheduled == {"a": 40, "b": 40, "c": 8}


def test_generated_text_is_found_again(make: Make) -> None:
    bench = make(block_size=8)
    bench.add("a", 8, max_tokens=9)
    while bench.scheduler.requests:
        bench.step()
    history = [*range(1, 9), *bench.tokens["a"]]
    follow_up = bench.add("b", [*history, 5, 6, 7], max_tokens=1)
    bench.step()
    # 8 + 9 tokens; the last one sampled was never computed, so two blocks are full of KV.
    assert follow_up.num_cached_tokens == 16


def test_prompt_logprobs_do_not_read_the_cache(make: Make) -> None:
    bench = make()
    bench.add("a", 64, max_tokens=1)
    bench.step()
    bench.add("b", 64, max_tokens=1, prompt_logprobs=0)
    bench.step()
    assert bench.scheduled == {"b": 64}


@pytest.mark.parametrize(("start", "found"), [(None, 0), (0, 0), (3, 0), (15, 15), (40, 40)])
def test_scored_prompts_read_the_cache_up_to_the_scores(
    make: Make, start: int | None, found: int
) -> None:
    """The states from there on are needed, and a beginning of fewer than 4 tokens is not
    copied."""
    bench = make(block_size=16)
    bench.add("a", 64, max_tokens=1)
    bench.step()
    rows = [[1]] * (63 - (start or 0))
    scores = {"prompt_logprob_token_ids": rows, "prompt_logprob_start": start}
    b = bench.add("b", 64, max_tokens=1, **scores)
    bench.step()
    assert b.num_cached_tokens == found and bench.scheduled == {"b": 64 - found}
    c = bench.add("c", 64, max_tokens=1, **scores, skip_reading_prefix_cache=True)
    bench.step()
    assert c.num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_shared(make: Make) -> None:
    bench = make(caching=False)
    bench.add("a", 64)
    bench.add("b", 64)
    bench.step()
    assert bench.scheduled == {"a": 64, "b": 64}
    assert not set(bench.blocks("a")) & set(bench.blocks("b"))


def test_fcfs_preempts_the_last_admitted(make: Make) -> None:
    bench = make(num_blocks=6, block_size=8, caching=False)  # 5 usable blocks
    a = bench.add("a", [1] * 16, max_tokens=30)
    b = bench.add("b", [2] * 16, max_tokens=30)
    bench.step()  # 2 + 2 blocks
    bench.step()  # a opens block 5: the pool is full; b needs one more: b itself is the victim
    assert bench.scheduled == {"a": 1}
    assert bench.last.preempted_req_ids == ["b"]
    assert b.status is RequestStatus.PREEMPTED
    assert (b.num_computed_tokens, b.num_preemptions, b.num_output_tokens) == (0, 1, 1)
    assert a.num_preemptions == 0


def test_a_preempted_request_comes_back_with_its_output(make: Make) -> None:
    bench = make(num_blocks=6, block_size=8, caching=False)
    bench.add("a", [1] * 16, max_tokens=10)
    bench.add("b", [2] * 16, max_tokens=10)
    bench.add("c", [3] * 16, max_tokens=10)
    seen = []
    for _ in range(80):
        if not bench.scheduler.requests:
            break
        bench.step(next_token=lambda r: r.prompt_token_ids[0] * 100 + r.num_output_tokens)
        seen += [(r.req_id, len(r.output_token_ids)) for r in bench.last.scheduled_new_reqs]
    assert bench.tokens == {n: [100 * (i + 1) + t for t in range(10)] for i, n in enumerate("abc")}
    assert any(count > 0 for _, count in seen), "nothing was resumed with output"
    assert [name for name, _ in seen if name == "b"].__len__() > 1


def test_nothing_is_admitted_in_a_step_that_preempted(make: Make) -> None:
    bench = make(num_blocks=6, block_size=8, caching=False)
    bench.add("a", [1] * 16, max_tokens=30)
    bench.add("b", [2] * 16, max_tokens=30)
    bench.step()
    bench.add("tiny", [3], max_tokens=1)
    bench.step()
    assert bench.last.preempted_req_ids == ["b"]
    assert bench.last.scheduled_new_reqs == []


def test_waiting_is_strict_head_of_line(make: Make) -> None:
    bench = make(num_blocks=6, block_size=8, caching=False)
    bench.add("a", [1] * 24, max_tokens=2)
    bench.add("big", [2] * 24, max_tokens=2)
    bench.add("tiny", [3], max_tokens=2)
    bench.step()
    assert bench.scheduled == {"a": 24}  # big does not fit, tiny would, but is behind it


def test_priority_orders_admission_and_chooses_the_victim(make: Make) -> None:
    bench = make(num_blocks=6, block_size=8, caching=False, scheduling_policy="priority")
    bench.add("late", [1] * 16, priority=5, max_tokens=30)
    bench.add("urgent", [2] * 16, priority=-1, max_tokens=30)
    bench.step()
    assert list(bench.scheduled) == ["urgent", "late"]
    bench.step()
    assert bench.last.preempted_req_ids == ["late"]


def test_what_a_priority_victim_registered_ahead_is_not_found(make: Make) -> None:
    """The least urgent request stands first in `running` and already has two blocks' worth of
    tokens in the step when a later one needs room. Those blocks were registered, but will not be
    computed: a lookup must not find them. (`low` is longer than the cache, so it must be let in
    without room for all of it.)"""
    bench = make(
        num_blocks=9,
        block_size=8,
        budget=24,
        scheduler_reserve_full_isl=False,
        scheduling_policy="priority",
        long_prefill_token_threshold=16,
    )
    low = bench.add("low", list(range(100, 180)), priority=9)
    bench.step()
    bench.add("high", list(range(200, 208)), priority=0)
    bench.step()
    assert bench.scheduled == {"low": 16, "high": 8}
    bench.step()  # low takes the last two blocks, then high needs one
    assert bench.last.preempted_req_ids == ["low"]
    assert bench.scheduled == {"high": 1}
    assert low.num_computed_tokens == 0
    assert bench.scheduler.kv.get_computed_blocks(low)[1] == 40


def test_chunked_prefill_off_waits_for_a_whole_budget(make: Make) -> None:
    bench = make(budget=64, max_model_len=64, enable_chunked_prefill=False)
    bench.add("a", [1] * 40, max_tokens=2)
    bench.add("b", [2] * 40, max_tokens=2)
    bench.step()
    assert bench.scheduled == {"a": 40}
    bench.step()
    assert bench.scheduled == {"a": 1, "b": 40}


def test_long_prefill_threshold_applies_only_in_company(make: Make) -> None:
    bench = make(budget=1000, long_prefill_token_threshold=100)
    bench.add("a", [1] * 300)
    bench.step()
    assert bench.scheduled == {"a": 300}
    bench.add("b", [2] * 300)
    bench.step()
    assert bench.scheduled == {"a": 1, "b": 100}


def test_max_num_seqs(make: Make) -> None:
    bench = make(seqs=2)
    for name in "abc":
        bench.add(name, [ord(name)] * 4, max_tokens=2)
    bench.step()
    assert list(bench.scheduled) == ["a", "b"]
    bench.step()
    bench.step()
    assert list(bench.scheduled) == ["c"]


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
def test_abort_in_any_phase_frees_everything(make: Make, phase: str) -> None:
    bench = make(budget=32)
    bench.add("a", 100, max_tokens=50)
    for _ in range({"waiting": 0, "prefill": 1, "decode": 5}[phase]):
        bench.step()
    ended = bench.scheduler.finish_requests(["a", "a", "nobody"], RequestStatus.FINISHED_ABORTED)
    assert [r.request_id for r in ended] == ["a"]
    bench.scheduler.check_integrity()
    assert bench.scheduler.kv.usage == 0.0
    assert bench.scheduler.has_requests, "the worker has yet to hear of it"
    bench.step()
    assert bench.last.finished_req_ids == ["a"]
    assert not bench.scheduler.has_requests


def test_eos_on_the_last_allowed_position_counts_as_stop(make: Make) -> None:
    bench = make()
    bench.add("a", 4, max_tokens=2, ignore_eos=False, eos_token_ids=[99])
    bench.step()
    bench.step(next_token=lambda r: 99)
    assert bench.finished == {"a": "stop"}


def test_stop_token_id_is_the_reason(make: Make) -> None:
    bench = make()
    bench.add("a", 4, max_tokens=9, stop_token_ids=[55])
    bench.step()
    (output,) = bench.step(next_token=lambda r: 55)
    assert (str(output.finish_reason), output.stop_reason) == ("stop", 55)
    assert output.new_token_ids == [55]


def test_context_length_ends_a_request(make: Make) -> None:
    bench = make(max_model_len=12)
    bench.add("a", 10, max_tokens=100)
    bench.step()
    bench.step()
    assert bench.finished == {"a": "length"}
    assert len(bench.tokens["a"]) == 2


def test_a_failed_request_ends_alone_and_poisons_nothing(make: Make) -> None:
    bench = make(block_size=8)
    bench.add("bad", 20, max_tokens=5)
    bench.add("good", [7] * 20, max_tokens=5)
    bench.step(failed={"bad": "numerical: NaN"})
    assert bench.finished == {"bad": "error"}
    again = bench.add("again", 20, max_tokens=5)
    bench.step()
    assert again.num_cached_tokens == 0, "blocks of a failed request were found again"
    while bench.scheduler.requests:
        bench.step()
    assert len(bench.tokens["good"]) == 5


def test_a_request_that_shared_a_failed_prefix_computes_again(make: Make) -> None:
    bench = make(block_size=8)
    bench.add("bad", 20, max_tokens=5)
    reader = bench.add("reader", 20, max_tokens=5)
    bench.step(failed={"bad": "injected"})
    assert "reader" not in bench.tokens
    assert reader.status is RequestStatus.PREEMPTED
    bench.step()
    assert bench.scheduled == {"reader": 20}


def test_replayed_output_stays_output(make: Make) -> None:
    """A journal replayed into a new engine: prompt and output come back as one prefill."""
    bench = make()
    bench.add("a", 10, max_tokens=5, outputs=[1000, 1001, 1002])
    bench.step()
    assert bench.scheduled == {"a": 13}
    assert bench.last.scheduled_new_reqs[0].output_token_ids == [1000, 1001, 1002]
    bench.step()
    assert bench.finished == {"a": "length"}
    assert bench.tokens["a"] == [1003, 1004]


def test_debug_lines_have_the_documents_fields(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    with caplog.at_level(logging.DEBUG, logger="quire"):
        bench = make(block_size=16)
        bench.add("a", 40)
        bench.add("b", 40)
        bench.step()
    text = caplog.text
    assert "[SCHED] step n_running=2 n_waiting=0 total_tokens=48 new=[a, b] preempted=[]" in text
    assert "num_scheduled_tokens = {a: 40, b: 8}" in text
    assert "[KV] req=a new_tokens=40 block_table_len=3 free_blocks=996" in text
    hits = {line.split("[CACHE HIT] ")[1] for line in text.splitlines() if "[CACHE HIT]" in line}
    assert sorted(hit.split()[1] for hit in hits) == ["block_id=1", "block_id=2"]
