"""The engine end to end with scripted tokens: text, stops, aborts, failures, bookkeeping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import quire.logger
import quire.params
from fake_executor import FakeExecutor
from quire import LLM
from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.errors import InvalidRequest
from quire.outputs import RequestOutput
from quire.params import RequestOutputKind, SamplingParams

TEXT = " one two three four five six seven eight nine ten"


@pytest.fixture
def make() -> Callable[..., tuple[LLMEngine, FakeExecutor]]:
    def build(text: str = TEXT, **options: object) -> tuple[LLMEngine, FakeExecutor]:
        engine = LLMEngine(
            EngineConfig.from_options(disable_log_stats=True, **options),
            executor=(executor := FakeExecutor(lambda prompt, n: tokens[n % len(tokens)])),
        )
        tokens = engine.tokenizer.encode(text, add_special_tokens=False)
        return engine, executor

    return build


def drain(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    seen: dict[str, list[RequestOutput]] = {}
    for _ in range(500):
        if not engine.has_unfinished_requests:
            break
        for output in engine.step():
            seen.setdefault(output.request_id, []).append(output)
        engine.core.scheduler.check_integrity()
        engine.frontend.output.check_integrity()
    assert not engine.has_unfinished_requests
    assert engine.core.kv.usage == 0.0
    assert engine.frontend.output.num_unfinished == 0
    return seen


def test_text_comes_out(make) -> None:  # type: ignore[no-untyped-def]
    engine, executor = make()
    engine.add_request("a", "Hello", SamplingParams(max_tokens=200, stop=" ten"))
    outputs = drain(engine)["a"]
    assert outputs[-1].outputs[0].text == " one two three four five six seven eight nine"
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert outputs[-1].outputs[0].stop_reason == " ten"
    assert not executor.known, "the worker was not told that the request ended"


def test_deltas_add_up(make) -> None:  # type: ignore[no-untyped-def]
    engine, _ = make()
    params = SamplingParams(max_tokens=12, output_kind=RequestOutputKind.DELTA)
    engine.add_request("d", "Hello", params)
    engine.add_request("c", "Hello", params.replace(output_kind=RequestOutputKind.CUMULATIVE))
    seen = drain(engine)
    assert "".join(o.outputs[0].text for o in seen["d"]) == seen["c"][-1].outputs[0].text
    assert sum(len(o.outputs[0].token_ids) for o in seen["d"]) == 12


def test_n_completions_share_the_prompt(make) -> None:  # type: ignore[no-untyped-def]
    engine, executor = make()
    params = SamplingParams(n=3, max_tokens=2, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("a", list(range(300, 340)), params)
    (output,) = drain(engine)["a"]
    assert [c.index for c in output.outputs] == [0, 1, 2]
    first = executor.batches[0]
    assert sorted(first.num_scheduled_tokens.values()) == [8, 8, 40]
    seeds = [r.sampling_params.seed for r in first.scheduled_new_reqs]
    assert output.seed is not None
    assert seeds == [output.seed, output.seed + 1, output.seed + 2]


def test_abort_midway(make) -> None:  # type: ignore[no-untyped-def]
    engine, executor = make()
    engine.add_request("a", "Hello", SamplingParams(max_tokens=100))
    engine.add_request("b", "Hello", SamplingParams(max_tokens=5))
    engine.step()
    engine.abort_request(["a", "unknown"])
    seen = drain(engine)
    assert "a" not in seen
    assert len(seen["b"][-1].outputs[0].token_ids) == 5
    assert not executor.known


def test_a_failure_is_one_requests_own(make) -> None:  # type: ignore[no-untyped-def]
    engine, executor = make()
    engine.add_request("bad", "Hello", SamplingParams(max_tokens=5))
    engine.add_request("good", "Other", SamplingParams(max_tokens=5))
    bad = next(iter(engine.core.scheduler.requests))
    executor.fail[bad] = "injected"
    seen = drain(engine)
    assert seen["bad"][-1].outputs[0].finish_reason == "error"
    assert seen["bad"][-1].error == "injected"
    assert len(seen["good"][-1].outputs[0].token_ids) == 5


def test_a_refused_request_leaves_nothing(make) -> None:  # type: ignore[no-untyped-def]
    engine, _ = make()
    with pytest.raises(InvalidRequest, match="at least one token"):
        engine.add_request("a", [], SamplingParams())
    with pytest.raises(InvalidRequest, match="9999"):
        engine.add_request("a", [1, 9999], SamplingParams())
    assert not engine.has_unfinished_requests
    engine.add_request("a", "fine", SamplingParams(max_tokens=1))
    assert len(drain(engine)["a"]) == 1


def test_control_verbs(make) -> None:  # type: ignore[no-untyped-def]
    engine, _ = make()
    engine.add_request("a", list(range(300, 340)), SamplingParams(max_tokens=2))
    engine.step()
    assert engine.core.call("reset_prefix_cache", {}) is False
    facts = engine.core.call("check_integrity", {})
    assert facts == {"running": 1, "waiting": 0, "free_blocks": 96, "total_blocks": 99}
    drain(engine)
    assert engine.core.call("reset_prefix_cache", {}) is True
    with pytest.raises(InvalidRequest, match="unknown verb 'dance'. Known: check_integrity"):
        engine.core.call("dance", {})
    with pytest.raises(InvalidRequest, match="verb 'check_integrity' has no argument 'x'"):
        engine.core.call("check_integrity", {"x": 1})


def test_small_pool_preempts_and_loses_nothing(make) -> None:  # type: ignore[no-untyped-def]
    engine = LLMEngine(
        EngineConfig.from_options(max_model_len=128, enable_prefix_caching=False),
        executor=FakeExecutor(lambda prompt, n: 300 + n, num_blocks=9, max_model_len=128),
    )
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    for i in range(8):
        engine.add_request(str(i), [400 + i] * 20, params)
    seen = drain(engine)
    for outputs in seen.values():
        assert outputs[-1].outputs[0].token_ids == list(range(300, 340))
    assert max(o[-1].metrics.num_preemptions for o in seen.values() if o[-1].metrics) > 0


def test_arguments_of_a_wrong_type_are_named() -> None:
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("generate", {"prompts": 5}, "prompts must be a prompt or a list of prompts, got 5"),
        ("generate", {"prompts": None}, "prompts must be .*, got None"),
        ("generate", {"prompts": "a", "sampling_params": 5}, "sampling_params must be .*, got 5"),
        ("generate", {"prompts": "a", "sampling_params": {"n": 1}}, "sampling_params must be"),
        ("generate", {"prompts": "a", "sampling_params": []}, "sampling_params has 0 entries"),
        ("generate", {"prompts": "a", "priority": 0.5}, "priority must be .*, got 0.5"),
        ("generate", {"prompts": "a", "priority": ["b"]}, "priority must be .*, got 'b'"),
        ("chat", {"messages": None}, "messages must be a conversation .*, got None"),
        ("chat", {"messages": [5]}, "messages must be a conversation"),
        ("chat", {"messages": "hello"}, "messages must be a conversation"),
        ("timeline", {"steps": "x"}, "steps must be an integer, got 'x'"),
        ("timeline", {"steps": math.nan}, "steps must be an integer, got nan"),
        ("explain", {"request_id": 5}, "request_id must be text, got 5"),
        ("explain_prefix", {"prompt": 5}, "prompt"),
        ("explain_prefix", {"prompt": [-1] * 20}, "got -1"),
    ]
    with LLM(max_num_batched_tokens=64, max_num_seqs=4) as llm:
        for verb, given, told in calls:
            with pytest.raises(InvalidRequest, match=told):
                getattr(llm, verb)(**given)
        assert not llm.llm_engine.core.scheduler.requests


def test_a_priority_that_nothing_reads_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quire.logger, "_said", set())
    params = SamplingParams(max_tokens=1, temperature=0)
    for policy, lines in (("priority", 0), ("fcfs", 1)):
        with LLM(max_num_seqs=4, scheduling_policy=policy) as llm:
            (plain,) = llm.generate("a", params, use_tqdm=False)
            for priority in (0, 2, [-1]):
                (output,) = llm.generate("a", params, use_tqdm=False, priority=priority)
                assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        told = [r for r in caplog.records if "generate(priority=) has no effect" in r.getMessage()]
        assert len(told) == lines


def test_parameters_of_many_prompts_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    words: list[str] = []
    check = quire.params._check
    shared = {"max_tokens": 1, "bad_words": ["alpha", "beta"], "allowed_token_ids": [7, 8, 7]}
    params = SamplingParams(**shared)
    with LLM(max_num_seqs=4) as llm:
        tokenizer = llm.get_tokenizer()
        encode = tokenizer.encode

        def counted(text: str, add_special_tokens: bool = True) -> list[int]:
            words.append(text)
            return encode(text, add_special_tokens)

        monkeypatch.setattr(tokenizer, "encode", counted)
        monkeypatch.setattr(quire.params, "_check", lambda p: (checked.append(p), check(p)))
        outputs = llm.generate([[5, 6, i] for i in range(20)], params, use_tqdm=False)
        one_each = [SamplingParams(temperature=1, max_tokens=1) for _ in range(3)]
        seeds = [o.seed for o in llm.generate([[5]] * 3, one_each, use_tqdm=False)]
    assert all(o.outputs[0].token_ids[0] in (7, 8) for o in outputs)
    assert words == ["alpha", " alpha", "beta", " beta"]
    assert len(checked) == 1 + 3 + 3, "once for twenty prompts; the three as made and as used"
    assert len({*seeds, *(o.seed for o in outputs)}) == 23, "each prompt draws its own seed"
