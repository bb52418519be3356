"""Explanations add up, and name the true cause."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_executor import FakeExecutor
from quire import SamplingParams
from quire.config import EngineConfig, ModelConfig, SchedulerConfig
from quire.engine.llm_engine import LLMEngine
from quire.observability.explain.explanation import Explanation
from quire.observability.explain.parts import Cause
from record_rig import Rig

WORK = {Cause.PREFILL, Cause.RECOMPUTED, Cause.DECODE, Cause.DECODE_BESIDE_PREFILL}

arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),  # at which step
        st.integers(1, 90),  # prompt tokens
        st.integers(1, 30),  # output tokens
        st.integers(0, 2),  # priority
        st.one_of(st.none(), st.integers(1, 25)),  # steps until it is aborted
    ),
    min_size=1,
    max_size=10,
)
limits = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(9, 30),
        "budget": st.sampled_from([8, 16, 40, 200]),
        "seqs": st.integers(1, 6),
        "caching": st.booleans(),
        "scheduling_policy": st.sampled_from(["fcfs", "priority", "sjf", "prefill_first", "fair"]),
        "long_prefill_token_threshold": st.sampled_from([0, 12]),
    }
)


def run(rig: Rig, load, idle: float, drafts: int) -> None:  # type: ignore[no-untyped-def]
    """Let requests come and go."""
    for tick in range(400):
        for index, (when, prompt, outputs, priority, _) in enumerate(load):
            if when == tick:
                rig.add(f"r{index}", prompt, outputs, priority=priority)
        for index, (when, *_, leaves) in enumerate(load):
            if leaves is not None and tick == when + leaves:
                rig.abort(f"r{index}")
        if rig.scheduler.has_requests:
            rig.step(drafts=drafts)
        elif tick > 40:
            return
        rig.clock.advance(idle)


@settings(max_examples=120, deadline=None)
@given(
    load=arrivals,
    limits=limits,
    idle=st.sampled_from([0.0, 0.0007]),
    ring=st.sampled_from([4096, 4096, 5, 30]),
    drafts=st.sampled_from([0, 0, 2]),
)
def test_parts_add_up_to_the_measured_latency(load, limits, idle, ring, drafts):  # type: ignore[no-untyped-def]
    rig = Rig(steps=ring, **{**limits, "seqs": min(limits["seqs"], limits["budget"])})
    run(rig, load, idle, drafts)
    recording = rig.records.snapshot()
    for internal in recording.accepted:
        told = rig.explain(internal.rpartition("-")[0])
        end = rig.ends.get(internal, rig.clock.now())
        assert math.isclose(told.seconds, end - rig.arrivals[internal], abs_tol=1e-9)
        assert math.isclose(math.fsum(p.seconds for p in told.parts), told.seconds, abs_tol=1e-9)
        assert all(p.seconds >= 0 and p.text for p in told.parts)
        if ring == 4096 and told.finish_reason == "length":
            worked = math.fsum(p.seconds for p in told.parts if p.cause in WORK)
            assert math.isclose(worked, math.fsum(rig.worked[internal]), abs_tol=1e-9)
            assert told.ttft is not None


def test_a_request_alone() -> None:
    rig = Rig(budget=64)
    internal = rig.add("a", 100, 5)
    rig.drain()
    told = rig.explain("a")
    assert (told.id, told.finish_reason, told.state) == ("a", "length", "finished")
    assert (told.num_prompt_tokens, told.num_output_tokens) == (100, 5)
    prefill = rig.part("a", "prefill")
    assert prefill.steps == 2 and prefill.details["tokens"] == 100
    assert prefill.seconds == pytest.approx(sum(rig.worked[internal][:2]) + 0)
    assert rig.part("a", "decode").details["mean_batch"] == 1
    assert rig.part("a", "intake").seconds == pytest.approx(0.0003)
    assert rig.part("a", "delivery").seconds == pytest.approx(0.0002)
    first = 0.0003 + sum(rig.worked[internal][:2]) + 0.0002
    assert told.ttft == pytest.approx(first)
    assert "100 tokens in 2 steps" in prefill.text


def test_one_that_comes_within_a_step_waits_for_its_end() -> None:
    rig = Rig(budget=2048)
    rig.add("long", 1000, 3)
    started = rig.clock.now()
    rig.step(delivery=0.0)
    ended = rig.clock.now()
    rig.add("me", 8, 2, arrival=started + 0.02, intake=0.0003)
    rig.step(pause=0.0005)
    rig.drain()
    part = rig.part("me", "queued", "step")
    assert part.seconds == pytest.approx(ended - started - 0.02)
    assert {b.id: b.tokens for b in part.requests} == {"long": 1000}
    assert part.steps == 1 and part.text.startswith("queued behind 1 prefill (long")
    assert rig.part("me", "intake").seconds == pytest.approx(0.0003)


def test_one_that_comes_to_an_idle_engine_was_behind_nothing() -> None:
    rig = Rig()
    rig.add("before", 1000, 1)
    rig.drain()
    rig.clock.advance(1.0)
    rig.add("me", 8, 2)
    rig.step(pause=0.0005)
    rig.drain()
    told = rig.explain("me")
    assert [p.cause for p in told.parts if p.cause == "queued"] == []
    assert rig.part("me", "between_steps").seconds >= 0.0005


def test_behind_long_prefills() -> None:
    rig = Rig(budget=64, seqs=8)
    for name in ("x", "y", "z"):
        rig.add(name, 400, 2)
    rig.add("me", 5, 2)
    rig.drain()
    part = rig.part("me", "queued", "budget")
    # The end of z is in the step that lets it in.
    assert {b.id: b.tokens for b in part.requests} == {"x": 400, "y": 400, "z": 350}
    assert part.text.startswith("queued behind 3 prefills (")
    assert "--max-num-batched-tokens" in part.text
    assert part.details["num_ahead"] == 2, "y and z stood before it; x was never kept waiting"


def test_for_a_seat() -> None:
    rig = Rig(seqs=2)
    rig.add("x", 4, 20)
    rig.add("y", 4, 20)
    rig.step()
    rig.add("me", 4)
    rig.drain()
    part = rig.part("me", "queued", "max_num_seqs")
    assert {b.id for b in part.requests} == {"x", "y"}
    assert "all 2 --max-num-seqs places were taken, by x, y" in part.text
    assert part.share > 0.7


def test_for_blocks() -> None:
    rig = Rig(num_blocks=8)
    rig.add("x", 90, 6)
    rig.step()
    rig.add("me", 60)
    rig.drain()
    part = rig.part("me", "queued", "blocks")
    assert "too few free KV blocks (it needed 4 and 1 were free), held by x" in part.text


def test_preempted_for_whom_and_what_it_cost() -> None:
    rig = Rig(num_blocks=5)
    rig.add("x", 31, 30)
    rig.add("me", 31, 30)
    rig.drain()
    told = rig.explain("me")
    assert told.num_preemptions == 1
    lost = rig.part("me", "preempted")
    assert lost.details["for"] == "x" and lost.details["tokens"] == 32
    assert f"preemption at step {lost.details['step']} for request x (32 tokens lost" in lost.text
    again = rig.part("me", "recomputed")
    assert "again after the preemption at step" in again.text and "for request x" in again.text
    assert again.details["tokens"] >= 32


def test_the_slowest_step_and_who_made_it_slow() -> None:
    rig = Rig()
    rig.add("me", 4, 40)
    for _ in range(5):
        rig.step()
    rig.add("z", 2000)
    rig.drain()
    told = rig.explain("me")
    assert told.slowest_step is not None
    assert told.slowest_step["because_of"] == "z" and told.slowest_step["prompt_tokens"] == 2000
    assert "because of a 2,000-token prefill of z" in str(told)
    beside = rig.part("me", "decode_beside_prefill")
    assert beside.steps == 1 and beside.requests[0].id == "z"
    assert rig.part("me", "decode").steps == 38


def test_own_prefill_blames_nobody() -> None:
    rig = Rig()
    rig.add("me", 500, 4)
    rig.add("tiny", 3, 4)
    rig.drain()
    slowest = rig.explain("me").slowest_step
    assert slowest is not None and slowest["because_of"] is None


def test_stalled_while_running() -> None:
    rig = Rig(budget=4, seqs=4)
    for i in range(4):
        rig.add(f"r{i}", 1, 9)
    rig.step()
    rig.scheduler.set_limits(max_num_batched_tokens=3, max_num_seqs=3)
    rig.step()
    rig.step()
    assert rig.part("r3", "stalled", "budget").steps == 2


@pytest.mark.parametrize(
    "first, second, expected",
    [
        (list(range(64)), list(range(64)), "all of the prefix was cached: 63 of 64"),
        (list(range(64)), [*range(40), 900, *range(41, 64)], "at token 40, inside block 2"),
        (
            list(range(64)),
            list(range(96)),
            "64 of 96 tokens were cached; no cached block continues",
        ),
        (list(range(64)), list(range(500, 564)), "nothing was cached"),
    ],
)
def test_why_the_prefix_missed(first: list[int], second: list[int], expected: str) -> None:
    rig = Rig(caching=True)
    rig.add("a", first)
    rig.drain()
    rig.add("b", second)
    rig.drain()
    prefix = rig.explain("b").prefix
    assert prefix is not None and expected in prefix.text


def test_while_it_waits() -> None:
    rig = Rig(seqs=1)
    rig.add("x", 4, 50)
    rig.step()
    rig.add("me", 4)
    for _ in range(3):
        rig.step()
    told = rig.explain("me")
    assert (told.state, told.finish_reason, told.prefix) == ("waiting", None, None)
    assert rig.part("me", "queued", "max_num_seqs").steps == 3


def told_to_wait(prompt: list[int], first: list[int], **params: object) -> Explanation:
    """What is told of a request that waits for a seat, after `first` has left its blocks."""
    engine = LLMEngine(
        EngineConfig(
            ModelConfig(max_model_len=512), scheduler=SchedulerConfig(max_num_seqs=1)
        ),
        executor=FakeExecutor(lambda prompt, count: 5, vocab_size=2048),
    )  # fmt: skip
    engine.add_request("first", first, SamplingParams(max_tokens=1))
    engine.step()
    engine.add_request("running", [7] * 20, SamplingParams(max_tokens=50, ignore_eos=True))
    engine.add_request("me", prompt, SamplingParams(max_tokens=1, n=2, **params))  # type: ignore[arg-type]
    for _ in range(3):
        engine.step()
    told = engine.explain("me")
    assert [e.state for e in told] == ["waiting", "waiting"] and told[0].prefix == told[1].prefix
    while engine.has_unfinished_requests:
        engine.step()
    after = engine.explain("me")[0].prefix
    assert after is not None and not after.expected, "once it came in, the records tell"
    return told[0]


def test_what_one_that_waits_would_find() -> None:
    first = list(range(100, 164))
    prefix = told_to_wait([*first[:40], 9, *first[41:]], first).prefix
    assert prefix is not None and prefix.expected
    assert (prefix.num_cached_tokens, prefix.first_missing_block) == (40, 2)
    assert prefix.first_difference == 40
    assert prefix.text.startswith("if it came in now: 40 of 64 tokens were cached; at token 40")
    assert prefix.text.endswith("the nearest cached content differs at token 40")
    whole = told_to_wait(first, first).prefix
    assert whole is not None and "all of the prefix was cached: 63 of 64" in whole.text
    none = told_to_wait(list(range(900, 930)), first).prefix
    assert none is not None and "nothing was cached" in none.text
    scored = told_to_wait(first, first, prompt_logprobs=1).prefix
    assert scored is not None and "prompt_logprobs" in scored.text


def test_before_the_core_spoke_of_it() -> None:
    rig = Rig()
    rig.add("me", 4)
    rig.clock.advance(1.0)
    told = rig.explain("me")
    assert told.state == "accepted" and [p.cause for p in told.parts] == ["intake"]
    assert told.seconds == pytest.approx(1.0003)


def test_through_a_crash() -> None:
    rig = Rig()
    internal = rig.add("me", 30, 10)
    for _ in range(4):
        rig.step()
    rig.start_core()
    rig.clock.advance(2.0)
    rig.add("me", 30, 10, outputs=[7, 7, 7, 7])
    rig.drain()
    told = rig.explain("me")
    assert rig.part("me", "restart").seconds == pytest.approx(2.0003, abs=1e-3)
    assert rig.part("me", "recomputed").details["tokens"] == 34
    assert math.isclose(told.seconds, rig.ends[internal] - rig.arrivals[internal])


def test_older_than_the_ring() -> None:
    rig = Rig(steps=10)
    internal = rig.add("me", 4, 60)
    rig.drain()
    told = rig.explain("me")
    assert told.seconds == pytest.approx(rig.ends[internal] - rig.arrivals[internal])
    assert rig.part("me", "earlier").seconds > 0.5 * told.seconds
    assert told.ttft is None, "not in the records any more"
    assert rig.part("me", "decode").steps == 10


def test_a_starved_step_is_a_cause_of_its_own() -> None:
    """A step of 6 ms took 1.1 s because others had the cores: no prompt is to blame for that."""
    rig = Rig()
    rig.add("me", 10, 6)
    rig.step(starved=0.0)
    rig.add("other", 40, 2)
    rig.step(starved=1.1)
    rig.step(starved=0.0002)  # too little to mention
    rig.drain()
    told = rig.explain("me")
    assert sum(part.seconds for part in told.parts) == pytest.approx(told.seconds)
    waited = rig.part("me", "core_wait")
    assert waited.seconds == pytest.approx(1.1) and waited.steps == 1
    assert waited.text == "waiting for a core, which other work on this machine had, in 1 step"
    beside = rig.part("me", "decode_beside_prefill")
    assert beside.details["slowest_step"]["seconds"] < 0.02
    assert told.slowest_step is not None and told.slowest_step["because_of"] is None
    assert "1.11 s with 2 requests" in str(told) and "1.10 s of it waiting for a core" in str(told)
    assert rig.part("other", "core_wait").seconds == pytest.approx(1.1)


def test_a_pause_without_a_core_is_the_same_cause() -> None:
    rig = Rig()
    rig.add("me", 10, 4)
    rig.step(starved=0.0)
    rig.step(starved=0.0, pause=0.7)
    rig.drain()
    waited = rig.part("me", "core_wait")
    assert waited.seconds == pytest.approx(0.7)
    assert waited.text.endswith("which other work on this machine had, in pauses between steps")
    assert rig.part("me", "between_steps").seconds < 0.01
    told = rig.explain("me")
    assert sum(part.seconds for part in told.parts) == pytest.approx(told.seconds)


def test_what_is_not_read_is_not_told() -> None:
    rig = Rig()
    rig.add("me", 10, 3)
    rig.step(starved=None)
    rig.drain()
    assert {part.cause for part in rig.explain("me").parts}.isdisjoint({"core_wait"})


def test_while_its_grammar_is_compiled() -> None:
    rig = Rig(seqs=1)
    rig.add("x", 4, 50)
    rig.step()
    rig.add("me", 4, compiles=True)
    rig.add("other", 4)
    for _ in range(2):
        rig.step()
    assert rig.explain("me").state == "compiling"
    assert rig.explain("other").state == "waiting"
    rig.scheduler.queue_compiled(lambda request: True)
    compiled = rig.clock.now()
    for _ in range(2):
        rig.step()
    assert rig.explain("me").state == "waiting"
    part = rig.part("me", "queued", "grammar")
    begun, ended = part.spans[0][0], part.spans[-1][1]
    assert ended == pytest.approx(compiled - rig.arrivals["me-0000000a"]) and 0 < begun < ended
    assert "its grammar was being compiled" in part.text and part.steps == 2
    assert not part.requests
    # Who stands in the queue waits for what its head waits for, not for the grammar beside it.
    assert rig.part("other", "queued", "max_num_seqs").steps == 4
    assert {p.reason for p in rig.explain("other").parts if p.cause == "queued"} == {"max_num_seqs"}
    rig.drain()
    told = rig.explain("me")
    assert sum(p.seconds for p in told.parts) == pytest.approx(told.seconds)
    assert {p.reason for p in told.parts if p.cause == "queued"} >= {"grammar", "max_num_seqs"}


def test_while_its_grammar_is_compiled_in_a_ring_that_forgot_the_beginning() -> None:
    rig = Rig(steps=3)
    rig.add("x", 4, 50)
    rig.add("me", 4, compiles=True)
    for _ in range(8):
        rig.step()
    assert rig.explain("me").state == "compiling"
    assert rig.part("me", "queued", "grammar").steps >= 1
