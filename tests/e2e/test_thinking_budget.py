"""Reasoning ends when its budget is spent: the same tokens alone, in a crowd, in chunks, with KV
that is swapped or recomputed, and after kill -9 of the core; at every front door."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from live_server import title_of
from quire import LLM, AsyncLLM, EngineConfig, SamplingParams
from quire.config import ServerConfig
from quire.errors import InvalidRequest
from quire.serving.app import build_app
from quire.serving.server_state import ServerState
from thinking_model import CLOSE, OPEN, make_thinking_model

TURNS = [{"role": "user", "content": "Tell me a story about a fox."}]
ASK = {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": True}, "seed": 3}
LONG = {"ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_thinking_model(tmp_path_factory.mktemp("thinking") / "model"))


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, max_model_len=2048) as made:
        yield made


def opened(llm: LLM) -> list[int]:
    """A prompt that ends within the reasoning."""
    text = llm.get_tokenizer().apply_chat_template(
        TURNS, add_generation_prompt=True, enable_thinking=True
    )
    return text if isinstance(text, list) else llm.get_tokenizer().encode(text)


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


def tokens_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [[(c.token_ids, c.finish_reason) for c in o.outputs] for o in outputs]


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
    params, ids = crowd(), opened(llm)
    prompts = [[*range(300, 300 + 11 * (i % 5)), *ids] for i in range(len(params))]
    alone = [tokens_of(llm, [p], [one])[0] for p, one in zip(prompts, params, strict=True)]
    assert tokens_of(llm, prompts, params) == alone
    for options in (
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"num_gpu_blocks_override": 90, "preemption_mode": "recompute"},
        {"num_gpu_blocks_override": 90, "swap_space": 0.02, "preemption_mode": "swap"},
    ):
        with LLM(model, max_model_len=1200, block_size=16, **options) as other:
            assert tokens_of(other, prompts, params) == alone, options


def test_forced_tokens_cost_no_pass_of_their_own(llm: LLM, monkeypatch: Any) -> None:
    executor, steps = llm.llm_engine.core.executor, 0
    submit = executor.submit

    def counted(batch: Any) -> Any:
        nonlocal steps
        steps += 1
        return submit(batch)

    monkeypatch.setattr(executor, "submit", counted)
    params = SamplingParams(**LONG, seed=1, max_tokens=40, logit_bias={OPEN: -100.0, CLOSE: -100.0})
    tokens_of(llm, [opened(llm)], [params])
    plain, steps = steps, 0
    ((got, _),) = tokens_of(llm, [opened(llm)], [params.replace(thinking_token_budget=9)])[0]
    assert got.count(CLOSE) == 1 and len(got) == 40 and steps == plain - 1


def test_tools_after_reasoning_that_was_ended(model: str) -> None:
    """The grammar of the calls begins after the reasoning, whoever ends it."""
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"], "additionalProperties": False}}}  # fmt: skip
    with asyncio.Runner() as runner:
        server = Server(runner, model)
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


class Server:
    """A model behind all routes."""

    def __init__(self, runner: asyncio.Runner, model: str, **options: Any) -> None:
        self.run = runner.run
        config = EngineConfig.from_options(
            model=model, served_model_name="m", generation_config="vllm", max_model_len=2048
        )
        self.engine = self.run(AsyncLLM.start(config))
        self.run(self.engine.wait_ready())
        app = build_app(ServerState(ServerConfig(**options), self.engine))
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60
        )

    def close(self) -> None:
        self.run(self.client.aclose())
        self.run(self.engine.shutdown())

    def ask(self, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        reply = self.run(self.client.post(path, json=body))
        assert reply.status_code == status, reply.text
        return reply.json()


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Server]:
    with asyncio.Runner() as runner:
        made = Server(runner, model)
        yield made
        made.close()


def test_every_front_door(server: Server, llm: LLM) -> None:
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


def test_a_budget_of_anthropic(server: Server) -> None:
    body = server.ask("/v1/messages", {
        "messages": TURNS, "max_tokens": 1500, "temperature": 1, "seed": 1,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    })  # fmt: skip
    thought = [block for block in body["content"] if block["type"] == "thinking"]
    assert thought and body["usage"]["output_tokens"] <= 1500


def test_what_is_refused(model: str, server: Server) -> None:
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
        other = Server(runner, model, reasoning_parser="none")
        try:
            body = other.ask(
                "/v1/chat/completions", {**ASK, "thinking_token_budget": 5}, status=400
            )
            assert "--reasoning-parser" in body["error"]["message"]
            assert body["error"]["param"] == "thinking_token_budget"
        finally:
            other.close()


def core() -> psutil.Process:
    """Of the only engine with a process of its own."""
    return next(c for c in psutil.Process().children() if "quire::EngineCore" in title_of(c))


def test_kill_9_of_the_core(server: Server, llm: LLM) -> None:
    """Within the reasoning, at its end, and after it."""
    ids = opened(llm)
    params = SamplingParams(
        **LONG, seed=9, max_tokens=1500, thinking_token_budget=150,
        logit_bias={CLOSE: -100, OPEN: 2},
    )  # fmt: skip
    ((expected, _),) = tokens_of(llm, [ids], [params])[0]
    assert expected.count(CLOSE) >= 1

    async def run() -> list[int]:
        killed, got = 0, []
        async for output in server.engine.generate(
            {"prompt_token_ids": ids}, params, f"killed-{os.getpid()}"
        ):
            got = output.outputs[0].token_ids
            if killed < 2 and len(got) > (60, 200)[killed]:
                core().send_signal(signal.SIGKILL)
                killed += 1
        assert killed == 2
        return list(got)

    assert server.run(run()) == expected
