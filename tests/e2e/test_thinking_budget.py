"""Reasoning ends when its budget is spent: the same tokens alone, in a crowd, in chunks, with KV
that is swapped or recomputed, and after kill -9 of the core; at every front door."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import InvalidRequest
from routes_server import RoutesServer
from thinking_model import (
    ASK,
    CLOSE,
    OPEN,
    TURNS,
    count_steps,
    killed_twice,
    make_thinking_model,
    opened,
    same_in_all_company,
    tokens_of,
)

LONG = {"ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_thinking_model(tmp_path_factory.mktemp("thinking") / "model"))


def options(model: str) -> dict[str, Any]:
    return {"model": model, "served_model_name": "m", "max_model_len": 2048}


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, max_model_len=2048) as made:
        yield made


def crowd() -> list[SamplingParams]:
    """Budgets in all kinds of company."""
    more: list[dict[str, Any]] = [
        {"max_tokens": 1000},
        {"max_tokens": 200, "temperature": 0},
        {"max_tokens": 60, "logprobs": 1},
        {"max_tokens": 60, "n": 3},
        {"max_tokens": 60, "repetition_penalty": 1.3, "logit_bias": {CLOSE: -100.0, OPEN: 4.0}},
        {"max_tokens": 60, "bad_words": ["</think>"], "allowed_token_ids": [*range(300, 400), 10]},
        {"max_tokens": 60, "repetition_detection": {"max_pattern_size": 2, "min_count": 3}},
    ]
    return [
        SamplingParams(**{**LONG, "seed": i, "thinking_token_budget": budget, **fields})
        for i, fields in enumerate(more)
        for budget in ((50,) if fields["max_tokens"] > 100 else (0, 1, 17))
    ]


def test_a_budget_is_kept_and_the_rest_is_untouched(llm: LLM) -> None:
    ids = opened(llm)
    for budget in (0, 1, 5, 40):
        params = SamplingParams(
            **LONG, seed=1, max_tokens=80, thinking_token_budget=budget, logit_bias={OPEN: -100.0}
        )
        free = params.replace(thinking_token_budget=None, logit_bias={OPEN: -100, CLOSE: -100})
        ((got, _),), ((plain, _),) = tokens_of(llm, [ids, ids], [params, free])
        end = got.index(CLOSE)
        assert end <= budget and (end == budget or CLOSE not in plain[:end])
        if end == budget:
            assert got[:budget] == plain[:budget]
    none = params.replace(thinking_token_budget=-1)
    assert none.thinking_token_budget is None


def test_the_model_may_open_the_reasoning_itself(llm: LLM) -> None:
    """And again, when nothing of the budget is left."""
    params = SamplingParams(
        **LONG, seed=2, max_tokens=12, thinking_token_budget=6, logit_bias={OPEN: 100.0}
    )
    ((got, _),) = tokens_of(llm, [[300, 301, 302]], [params])[0]
    assert got == [OPEN, *[OPEN] * 6, CLOSE, OPEN, CLOSE, OPEN, CLOSE]


def test_the_same_tokens_alone_in_a_crowd_in_chunks_and_preempted(model: str, llm: LLM) -> None:
    same_in_all_company(model, llm, crowd(), num_blocks=90, max_model_len=1200)


def test_forced_tokens_cost_no_pass_of_their_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = count_steps(llm, monkeypatch)
    params = SamplingParams(**LONG, seed=1, max_tokens=40, logit_bias={OPEN: -100.0, CLOSE: -100.0})
    tokens_of(llm, [opened(llm)], [params])
    plain = steps()
    ((got, _),) = tokens_of(llm, [opened(llm)], [params.replace(thinking_token_budget=9)])[0]
    assert got.count(CLOSE) == 1 and len(got) == 40 and steps() == plain - 1


def test_tools_after_reasoning_that_was_ended(model: str) -> None:
    """The grammar of the calls begins after the reasoning, whoever ends it."""
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"], "additionalProperties": False}}}  # fmt: skip
    with asyncio.Runner() as runner:
        server = RoutesServer(runner, options(model))
        try:
            for budget in (0, 4, 30):
                body = server.ask("/v1/chat/completions", {
                    **ASK, "tools": [tool], "tool_choice": "required", "temperature": 1,
                    "thinking_token_budget": budget, "max_tokens": 300,
                    "logit_bias": {str(CLOSE): -100},
                })  # fmt: skip
                choice = body["choices"][0]
                assert choice["finish_reason"] == "tool_calls", body
                call = choice["message"]["tool_calls"][0]["function"]
                assert call["name"] == "get_weather" and '"city"' in call["arguments"]
                details = body["usage"].get("completion_tokens_details") or {}
                assert details.get("reasoning_tokens", 0) <= budget
        finally:
            server.close()


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[RoutesServer]:
    with asyncio.Runner() as runner:
        made = RoutesServer(runner, options(model))
        yield made
        made.close()


def test_every_front_door(server: RoutesServer, llm: LLM) -> None:
    asked = {"thinking_token_budget": 5, "logit_bias": {str(CLOSE): -100, str(OPEN): -100}}
    cut = {**asked, **LONG, "seed": 3, "max_tokens": 30}
    params = SamplingParams(
        **LONG, seed=3, max_tokens=30, thinking_token_budget=5,
        logit_bias={CLOSE: -100, OPEN: -100},
    )  # fmt: skip
    ids = opened(llm)
    ((expected, _),) = tokens_of(llm, [ids], [params])[0]
    assert expected[5] == CLOSE and expected.count(CLOSE) == 1
    body = server.ask("/v1/chat/completions", {**ASK, **cut, "return_token_ids": True})
    assert body["choices"][0]["token_ids"] == expected
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    assert body["choices"][0]["message"]["content"]
    body = server.ask("/v1/completions", {"prompt": ids, "return_token_ids": True, **cut})
    assert body["choices"][0]["token_ids"] == expected
    body = server.ask("/inference/v1/generate", {"token_ids": ids, "sampling_params": cut})
    assert body["choices"][0]["token_ids"] == expected
    body = server.ask("/v1/responses", {
        "input": TURNS[0]["content"], "chat_template_kwargs": {"enable_thinking": True},
        "max_output_tokens": 30, "ignore_eos": True, "temperature": 1, "seed": 3, **asked,
    })  # fmt: skip
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == 5
    rendered = server.ask("/v1/chat/completions/render", {**ASK, **cut})
    body = server.ask("/inference/v1/generate", rendered)
    assert body["choices"][0]["token_ids"] == expected


def test_a_budget_of_anthropic(server: RoutesServer) -> None:
    body = server.ask("/v1/messages", {
        "messages": TURNS, "max_tokens": 1500, "temperature": 1, "seed": 1,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    })  # fmt: skip
    thought = [block for block in body["content"] if block["type"] == "thinking"]
    assert thought and body["usage"]["output_tokens"] <= 1500


def test_what_is_refused(model: str, server: RoutesServer) -> None:
    for value, told in ((-2, "from"), (1.5, "1.5"), ("x", "x"), (2**40, str(2**40))):
        body = server.ask(
            "/v1/chat/completions", {**ASK, "thinking_token_budget": value}, status=400
        )
        error = body["error"]
        assert error["param"] == "thinking_token_budget"
        assert str(value) in error["message"], told
    with LLM() as plain, pytest.raises(InvalidRequest, match="reasoning has known marks"):
        plain.generate("a", SamplingParams(thinking_token_budget=5), use_tqdm=False)
    with asyncio.Runner() as runner:
        other = RoutesServer(runner, options(model), reasoning_parser="none")
        try:
            body = other.ask(
                "/v1/chat/completions", {**ASK, "thinking_token_budget": 5}, status=400
            )
            assert "--reasoning-parser" in body["error"]["message"]
            assert body["error"]["param"] == "thinking_token_budget"
        finally:
            other.close()


def test_sentences_of_granite_are_refused_by_name(model: str, tmp_path: Path) -> None:
    """They have many spellings in tokens, so no budget could be held."""
    template = tmp_path / "granite.jinja"
    template.write_text(
        "Write your thoughts after 'Here is my thought process:' and your response after 'Here is "
        "my response:'.{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    told = {**options(model), "chat_template": str(template)}
    with asyncio.Runner() as runner:
        other = RoutesServer(runner, told)
        try:
            body = other.ask("/v1/chat/completions", {**ASK, "thinking_token_budget": 5}, 400)
            assert "'Here is my thought process:', got 5" in body["error"]["message"]
            assert body["error"]["param"] == "thinking_token_budget"
        finally:
            other.close()
    said = "Here is my thought process:', got 5"
    with LLM(model, chat_template=str(template)) as llm, pytest.raises(InvalidRequest, match=said):
        llm.chat(TURNS, SamplingParams(thinking_token_budget=5), use_tqdm=False)


def test_kill_9_of_the_core(server: RoutesServer, llm: LLM) -> None:
    """Within the reasoning, at its end, and after it."""
    ids = opened(llm)
    params = SamplingParams(
        **LONG, seed=9, max_tokens=1500, thinking_token_budget=150,
        logit_bias={CLOSE: -100, OPEN: 2},
    )  # fmt: skip
    ((expected, _),) = tokens_of(llm, [ids], [params])[0]
    assert expected.count(CLOSE) >= 1

    assert killed_twice(server, ids, params, (60, 200)) == expected
