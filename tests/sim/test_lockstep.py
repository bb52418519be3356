"""A real engine is recorded, and the simulator decides the same in every step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.core.facts import FactKind
from quire.core.kv.pool import CANDIDATES
from quire.errors import ConfigError
from quire.sim.lockstep import Lockstep, Replayed, SimulatedEngine, fit_recorded
from quire.sim.scenario import pool_of
from quire.sim.simulator import Pool
from quire.workload.trace import Trace, TraceHeader, TraceRequest, read_trace

SCHEMA = {
    "type": "object",
    "properties": {"a_long_name_to_be_forced": {"type": "integer"}},
    "required": ["a_long_name_to_be_forced"],
    "additionalProperties": False,
}
CASES: dict[str, dict[str, Any]] = {
    "room": {"num_gpu_blocks_override": 200},
    "preemptions": {"num_gpu_blocks_override": 40},
    "swaps": {"num_gpu_blocks_override": 40, "swap_space": 0.02, "preemption_mode": "swap"},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
    "shortest first": {"scheduling_policy": "sjf", "long_prefill_token_threshold": 40},
    "no cache": {"enable_prefix_caching": False, "scheduling_policy": "priority"},
}


def drive(llm: LLM, seed: int) -> None:
    """Requests that share beginnings with each other and with earlier outputs, end by length, by
    stop strings and by aborts, and come between any two steps."""
    rng, engine = random.Random(seed), llm.llm_engine
    base = [rng.randrange(300, 1500) for _ in range(90)]
    prompts = [
        base[: rng.choice([0, 20, 33, 64, 90])]
        + [rng.randrange(300, 1500) for _ in range(rng.randint(1, 200))]
        for _ in range(60)
    ]
    sent = 0
    while sent < len(prompts) or engine.has_unfinished_requests:
        for _ in range(rng.choice([0, 0, 1, 1, 5])):
            if sent < len(prompts):
                params = SamplingParams(
                    max_tokens=rng.randint(1, 60),
                    ignore_eos=rng.random() < 0.7,
                    stop=["a"] if rng.random() < 0.1 else None,
                    structured_outputs={"json": SCHEMA} if rng.random() < 0.1 else None,
                )
                prompt = {"prompt_token_ids": prompts[sent]}
                engine.add_request(f"r{sent}", prompt, params, priority=rng.randint(0, 2))
                sent += 1
        if sent and rng.random() < 0.02:
            engine.abort_request([f"r{rng.randrange(sent)}"])
        if sent % 20 == 7:  # a queue that runs empty now and then
            while engine.has_unfinished_requests:
                engine.step()
            if rng.random() < 0.5:
                assert engine.reset_prefix_cache()
            else:
                engine.core.scheduler.drop_free_content()
        for output in engine.step():
            if output.finished and rng.random() < 0.3 and sent < len(prompts):
                said = [*output.prompt_token_ids, *output.outputs[0].token_ids]
                prompts[sent] = (said + prompts[sent])[:400]


def recorded(path: Path, seed: int, **options: Any) -> tuple[Trace, EngineConfig, Pool]:
    settings = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 512} | options
    llm = LLM(record=str(path), **settings)
    try:
        drive(llm, seed)
    finally:
        llm.llm_engine.shutdown()
    trace = read_trace(path)
    info = trace.header.info
    pool = Pool(info["num_blocks"], tuple(info["kv_windows"]), info["num_swap_blocks"])
    return trace, EngineConfig.from_dict(trace.header.config), pool


def kinds(steps: list[Replayed]) -> set[int]:
    return {decision.kind for step in steps for decision in step.expected}


@pytest.mark.parametrize("case", CASES)
def test_every_decision_is_the_engines(case: str, tmp_path: Path) -> None:
    trace, config, pool = recorded(tmp_path / "t.jsonl", len(case), **CASES[case])
    steps = list(Lockstep(trace, SimulatedEngine(trace, config, pool)))
    assert any(step.several for step in trace.steps), "a grammar forces several tokens at once"
    different = [step.recorded.step for step in steps if not step.is_same]
    assert len(steps) > 100 and not different
    assert {FactKind.QUEUED, FactKind.ADMITTED, FactKind.FINISHED} <= kinds(steps)
    if pool.num_blocks == 40:
        assert FactKind.PREEMPTED in kinds(steps), "the case is to show preemptions"
    if config.cache.enable_prefix_caching:
        assert sum(d.b for s in steps for d in s.expected if d.kind == FactKind.ADMITTED) > 500


def test_clients_that_leave_while_a_step_runs(tmp_path: Path) -> None:
    """Whoever leaves has not seen the tokens of the step that runs, perhaps not even the first, and
    a step may end a request before the core hears of it."""
    llm = LLM(record=str(tmp_path / "t.jsonl"), max_num_batched_tokens=64, max_num_seqs=4)
    engine, rng, left = llm.llm_engine, random.Random(3), 0
    shared = rng.choices(range(300, 1500), k=40)
    try:
        for i in range(80):
            length, prompt = rng.randint(1, 4), [*shared, *rng.choices(range(300, 1500), k=i % 7)]
            params = SamplingParams(max_tokens=length, ignore_eos=True)
            if i % 3 == 0:
                params = SamplingParams(max_tokens=length + 9, structured_outputs={"json": SCHEMA})
            known = set(engine.core.scheduler.requests)
            engine.add_request(f"r{i}", {"prompt_token_ids": prompt}, params)
            (name,) = set(engine.core.scheduler.requests) - known
            leaves, is_heard = rng.randrange(2 * length), rng.random() < 0.3
            for step in range(rng.randint(1, 5)):
                if step == leaves:
                    engine.frontend._recording.closed([name])
                    left += 1
                engine.step()
                if step == leaves and is_heard:
                    engine.core.abort_requests([name])
        while engine.has_unfinished_requests:
            engine.step()
    finally:
        llm.llm_engine.shutdown()
    trace = read_trace(tmp_path / "t.jsonl")
    assert {r.number for r in trace.requests} == {*range(1, 81)} and left > 20
    assert {r.finish for r in trace.requests} >= {"length", "abort"}
    config, pool = EngineConfig.from_dict(trace.header.config), pool_of(trace.header.info)
    steps = list(Lockstep(trace, SimulatedEngine(trace, config, pool)))
    assert any(step.several for step in trace.steps)
    assert not [step.recorded.step for step in steps if not step.is_same]


def test_requests_with_salts_leave_the_others_cache_alone(tmp_path: Path) -> None:
    """Only the latest blocks after a prefix are looked at: those of another salt do not count."""
    llm = LLM(record=str(tmp_path / "t.jsonl"), max_num_batched_tokens=256, max_num_seqs=4)
    rng, params = random.Random(5), SamplingParams(max_tokens=3, ignore_eos=True)
    ours = [rng.choices(range(300, 1500), k=10) for _ in range(4)]
    prompts: list[dict[str, Any]] = []
    for turn in range(3):
        prompts += [{"prompt_token_ids": prompt} for prompt in ours]
        for i in range(2 * CANDIDATES):
            salt = f"salt {turn * i % 5}"
            others = rng.choices(range(300, 1500), k=9)
            prompts.append({"prompt_token_ids": others, "cache_salt": salt})
    try:
        for prompt in prompts:
            llm.generate([prompt], params, use_tqdm=False)
    finally:
        llm.llm_engine.shutdown()
    trace = read_trace(tmp_path / "t.jsonl")
    info, config = trace.header.info, EngineConfig.from_dict(trace.header.config)
    steps = list(Lockstep(trace, SimulatedEngine(trace, config, pool_of(info))))
    found = [d.b for s in steps for d in s.expected if d.kind == FactKind.ADMITTED and d.b]
    assert len(found) == 8, "each of ours is found twice"
    assert not [step.recorded.step for step in steps if not step.is_same]


def test_steps_tell_whether_they_gave_a_token(tmp_path: Path) -> None:
    llm = LLM(record=str(tmp_path / "t.jsonl"), max_num_batched_tokens=64, max_num_seqs=8)
    prompt = {"prompt_token_ids": [random.Random(0).randrange(300, 1500) for _ in range(150)]}
    try:
        llm.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    finally:
        llm.llm_engine.shutdown()
    trace = read_trace(tmp_path / "t.jsonl")
    info, config = trace.header.info, EngineConfig.from_dict(trace.header.config)
    pool = Pool(info["num_blocks"], tuple(info["kv_windows"]), info["num_swap_blocks"])
    steps = Lockstep(trace, SimulatedEngine(trace, config, pool))
    assert [step.shape.head for step in steps if step.shape.tokens] == [0, 0, 1, 1, 1]


def test_other_settings_decide_otherwise_and_steps_can_be_fitted(tmp_path: Path) -> None:
    trace, config, pool = recorded(tmp_path / "t.jsonl", 1)
    smaller = Pool(pool.num_blocks // 20)
    assert not all(
        step.is_same for step in Lockstep(trace, SimulatedEngine(trace, config, smaller))
    )
    steps = list(Lockstep(trace, SimulatedEngine(trace, config, pool)))
    computed = sum(step.shape.tokens for step in steps)
    assert computed > sum(r.prompt_len for r in trace.requests) / 2
    assert not steps[-1].is_busy and sum(step.is_busy for step in steps) > 100
    model = fit_recorded(trace, config, pool)
    predicted = sum(model.seconds(step.shape) for step in steps if step.shape.tokens)
    assert 0.3 < predicted / sum(step.seconds for step in trace.steps) < 3
    assert model.overheads.gap > 0 and len(model.spread) in (0, 100)


def test_a_trace_without_its_beginning_is_refused() -> None:
    requests = [TraceRequest(0.0, 5, 5)]
    config, pool = EngineConfig.from_options(max_model_len=64), Pool(10)
    with pytest.raises(ConfigError, match="no steps"):
        empty = Trace(TraceHeader(), requests)
        Lockstep(empty, SimulatedEngine(empty, config, pool))


@pytest.mark.parametrize(
    "wrong",
    [{"num_blocks": "many"}, {"num_blocks": None}, {"kv_windows": 5}, {"num_swap_blocks": [-1]}],
)
def test_recorded_sizes_that_are_none(wrong: dict[str, Any]) -> None:
    said = {"num_blocks": 9, "kv_windows": [None, 64], "num_swap_blocks": 2, "device": "cpu"}
    assert pool_of(said) == Pool(9, (None, 64), 2)
    with pytest.raises(ConfigError, match=r"sizes of the engine's KV cache: Expected .* got "):
        pool_of(said | wrong)
