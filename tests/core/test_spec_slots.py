"""Draft tokens: scheduled after the known ones, judged by the result, never kept when wrong."""

from __future__ import annotations

from quire.core.batch import BatchResult


def start(bench, drafts, prompt=8, **params):
    request = bench.add("a", prompt, **{"max_tokens": 20, **params})
    bench.step()
    request.spec_token_ids = drafts
    return request


def verify(bench, sampled, drafts=None):
    batch = bench.scheduler.schedule()
    result = BatchResult({"a": sampled}, draft_token_ids={"a": drafts} if drafts else {})
    outputs = bench.scheduler.update(batch, result)
    bench.scheduler.check_integrity()
    return batch, outputs, bench.scheduler.make_stats(batch, result, outputs)


def test_drafts_count_against_the_budget_and_are_cleared(make):
    bench = make(budget=8, seqs=4)
    request = start(bench, [1, 2, 3])
    batch, outputs, stats = verify(bench, [1, 2, 50])
    assert batch.scheduled_spec_tokens == {"a": [1, 2, 3]}
    assert batch.num_scheduled_tokens == {"a": 4}
    assert outputs[0].new_token_ids == [1, 2, 50]
    assert not request.spec_token_ids
    assert request.num_computed_tokens == request.num_tokens - 1
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 2)


def test_all_rejected_and_all_accepted(make):
    bench = make()
    request = start(bench, [1, 2])
    verify(bench, [9], drafts=[4, 5])
    assert request.output_token_ids[-1:] == [9]
    assert request.num_computed_tokens == request.num_tokens - 1
    verify(bench, [4, 5, 6])
    assert request.output_token_ids[-3:] == [4, 5, 6]
    assert request.num_computed_tokens == request.num_tokens - 1


def test_drafts_are_cut_to_the_budget(make):
    bench = make(budget=8, seqs=8)
    start(bench, list(range(20)))
    batch = bench.scheduler.schedule()
    assert batch.num_scheduled_tokens == {"a": 8}
    assert batch.scheduled_spec_tokens == {"a": list(range(7))}


def test_no_draft_beyond_what_could_be_output(make):
    bench = make(max_model_len=12)
    start(bench, [1, 2, 3, 4, 5])
    # 9 tokens are there: the step can add 3, of which the last needs no draft.
    assert bench.scheduler.schedule().scheduled_spec_tokens == {"a": [1, 2]}
    bench = make()
    start(bench, [1, 2, 3, 4, 5], max_tokens=3)
    assert bench.scheduler.schedule().scheduled_spec_tokens == {"a": [1]}


def test_a_stop_inside_the_accepted_tokens(make):
    bench = make()
    request = start(bench, [1, 2, 3], stop_token_ids=[2])
    _, outputs, _ = verify(bench, [1, 2, 3, 4])
    assert outputs[0].new_token_ids == [1, 2]
    assert request.stop_reason == 2
    assert bench.scheduler.kv.usage == 0.0
    # What its last block is remembered by ends with its own tokens.
    again = bench.add("b", [*request.all_token_ids, 3, 4], max_tokens=1)
    bench.step()
    assert again.num_cached_tokens == request.num_tokens


def test_lookahead_keeps_slots_ready(make):
    bench = make(block_size=8)
    bench.scheduler.books.num_lookahead_tokens = 3
    start(bench, [], prompt=5)
    assert len(bench.blocks("a")) == 1
    bench.step()  # 6 computed after this step, 3 ahead
    assert len(bench.blocks("a")) == 2


def test_drafts_do_not_outlive_a_preemption(make):
    bench = make(num_blocks=5, caching=False)
    bench.add("a", 31, max_tokens=30)
    b = bench.add("b", 31, max_tokens=30)
    bench.step()
    bench.step()
    b.spec_token_ids = [1]
    bench.step()
    assert b.num_preemptions == 1
    assert not b.spec_token_ids
    bench.drain()
    assert bench.tokens["b"] == [1000 + i for i in range(30)]


def test_drafts_of_the_one_that_gives_way_are_not_in_the_batch(make):
    bench = make(num_blocks=5, caching=False)
    bench.add("a", 31, max_tokens=30)
    b = bench.add("b", 31, max_tokens=30)
    while b.num_computed_tokens < 32:
        bench.step()
    b.spec_token_ids = [1, 2]
    batch = bench.scheduler.schedule()
    assert batch.preempted_req_ids == ["b"]
    assert batch.scheduled_spec_tokens == {}


def test_a_draft_never_fills_a_cached_block(make):
    bench = make(block_size=8)
    request = start(bench, [70, 71, 72], prompt=6)
    verify(bench, [9])  # the block held 6 + 1 known tokens and a wrong draft
    pool = bench.scheduler.kv.block_pool
    assert not [b for b in pool.blocks if b.block_hash]
    bench.step()
    known = [b for b in pool.blocks if b.block_hash]
    assert [b.token_ids for b in known] == [request.all_token_ids[:8]]
