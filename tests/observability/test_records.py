"""The ring forgets in order, stays within its bounds, and knows what it has forgotten."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.core.facts import RECORD_BYTES
from quire.core.stats import StepStats
from quire.engine.frontend.output_processor import ActiveCompletion
from quire.engine.frontend.questions import Question
from quire.errors import ConfigError, InvalidRequest, NotFound
from quire.observability.recorder.replay import Replay
from quire.observability.recorder.ring import FACT_BYTES_PER_STEP, StepRecords
from record_rig import Rig


def question(rig: Rig, *active: str) -> Question:
    listed = [
        ActiveCompletion(name, 0, f"{name}-0000000a", rig.arrivals[f"{name}-0000000a"], 4, 2)
        for name in active
    ]
    return Question(rig.records, listed, rig.clock.now(), EngineConfig())


def test_replayed_batches_are_the_scheduled_ones() -> None:
    rig = Rig(num_blocks=12, budget=20, seqs=3, steps=15)
    for i in range(9):
        rig.add(f"r{i}", 10 * i + 3, 5 + i)
    told: list[dict[str, int]] = []
    while rig.scheduler.requests:
        before = {n: len(w) for n, w in rig.worked.items()}
        rig.step()
        told.append({n for n, w in rig.worked.items() if len(w) > before.get(n, 0)})  # type: ignore[arg-type]
    recording = rig.records.snapshot()
    assert len(recording) == 15 < len(told)
    steps = list(Replay(recording))
    names = [{recording.names[rig.epoch, n] for n in step.scheduled} for step in steps]
    assert names == told[-15:]
    assert [sum(s.scheduled.values()) for s in steps] == [s.row.num_scheduled_tokens for s in steps]


def test_ring_is_bounded() -> None:
    rig = Rig(steps=20)
    for i in range(300):
        rig.add(f"r{i}", 3, 2)
        rig.step()
    records = rig.records
    assert len(records) == 20
    assert len(records._names) < 60 and len(records._accepted) < 60 and len(records._seen) < 60
    assert len(records.external_ids()) < 60
    assert not records._before.ended and len(records._before.lives) < 5


def test_bytes_are_bounded_too() -> None:
    records = StepRecords(4)
    big = bytes(RECORD_BYTES * 60)
    for step in range(1, 9):
        records.record(StepStats(step=step, facts=big), None)
    assert 0 < records._fact_bytes <= 4 * FACT_BYTES_PER_STEP
    assert len(records) == 1


def test_no_ring() -> None:
    records = StepRecords(0)
    records.accept("a", 0, "a-0", 1.0)
    records.record(StepStats(step=1), None)
    assert len(records) == 0 and not records.external_ids()
    with pytest.raises(InvalidRequest, match="--record-steps is 0"):
        Question(records, [], 0.0, EngineConfig())


def test_bad_size_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="--record-steps must be an integer from 0 to 1000000, got -1"
    ):
        EngineConfig.from_options(record_steps=-1)


def test_unknown_id_names_some_that_are_known() -> None:
    rig = Rig()
    for i in range(14):
        rig.add(f"r{i}", 3, 2)
    rig.drain()
    with pytest.raises(NotFound) as caught:
        question(rig).explain("nobody")
    text = caught.value.message
    assert "'nobody'" in text and "r13, r12" in text and "and 4 more" in text


def test_the_servers_prefix_may_be_left_out() -> None:
    rig = Rig()
    for name in ("cmpl-mine-0", "cmpl-mine-1", "chatcmpl-yours"):
        rig.add(name, 3, 2)
    rig.drain()
    asked = question(rig)
    assert [e.id for e in asked.explain("mine")] == ["cmpl-mine-0", "cmpl-mine-1"]
    assert [e.id for e in asked.explain("cmpl-mine")] == ["cmpl-mine-0", "cmpl-mine-1"]
    assert [e.id for e in asked.explain("cmpl-mine-1")] == ["cmpl-mine-1"]
    assert [e.id for e in asked.explain("yours")] == ["chatcmpl-yours"]


def test_the_beginning_of_an_id_is_enough() -> None:
    rig = Rig()
    for name in ("chatcmpl-abc111", "chatcmpl-abd222", "cmpl-xyz-0", "cmpl-xyz-1", "cmpl-xyzz-0"):
        rig.add(name, 3, 2)
    rig.drain()
    asked = question(rig)
    for given in (
        "chatcmpl-abc",
        "abc1",
        "chatcmpl-abc\N{HORIZONTAL ELLIPSIS}",
        "abc...",
        "abc111[0]",
    ):
        assert [e.id for e in asked.explain(given)] == ["chatcmpl-abc111"], given
    assert [e.id for e in asked.explain("xyz")] == ["cmpl-xyz-0", "cmpl-xyz-1"]
    assert [e.id for e in asked.explain("xyzz")] == ["cmpl-xyzz-0"]
    with pytest.raises(InvalidRequest) as caught:
        asked.explain("ab")
    assert caught.value.message == (
        "2 requests begin with 'ab': chatcmpl-abd222, chatcmpl-abc111; give more of the id"
    )
    with pytest.raises(InvalidRequest, match="3 requests begin with 'xy'"):
        asked.explain("xy")
    for given in ("abe", "\N{HORIZONTAL ELLIPSIS}", "abc111[1]"):
        with pytest.raises(NotFound):
            asked.explain(given)


def test_where_requests_stand() -> None:
    rig = Rig(seqs=1)
    rig.add("x", 4, 50)
    rig.step()
    for name in ("y", "z"):
        rig.add(name, 4)
    rig.step()
    rig.add("new", 4)
    rig.clock.advance(1.0)
    states = {s.id: s for s in question(rig, "x", "y", "z", "new").requests()}
    assert [states[n].state for n in ("x", "y", "z", "new")] == [
        "running", "waiting", "waiting", "accepted",
    ]  # fmt: skip
    assert (states["y"].wait_reason, states["y"].queue_head) == ("max_num_seqs", True)
    assert (states["z"].wait_reason, states["z"].queue_head) == ("max_num_seqs", False)
    assert states["x"].wait_reason is None and states["x"].num_output_tokens == 2
    assert states["new"].age == pytest.approx(1.0003)


def test_a_core_that_has_counted_beyond_32_bits() -> None:
    with LLM(
        record_steps=64, scheduling_policy="priority", max_num_batched_tokens=2**31 - 1
    ) as llm:
        books = llm.llm_engine.core.scheduler.books
        books.step, books.facts._next_number = 2**32 - 2, 2**32 - 1
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        outputs = llm.generate(
            ["One", "Two"], params, priority=[2**63 - 1, -(2**63)], use_tqdm=False
        )
        assert [len(o.outputs[0].token_ids) for o in outputs] == [6, 6]
        rows = llm.llm_engine.frontend.records.snapshot()
        assert rows.row(0).step == 2**32 - 1 and rows.row(-1).step > 2**32
        for output in outputs:
            (told,) = llm.explain(output.request_id)
            assert told.state == "finished" and told.num_output_tokens == 6
        assert llm.timeline()["traceEvents"]
        assert llm.llm_engine.question().signals(60.0)["steps"]
