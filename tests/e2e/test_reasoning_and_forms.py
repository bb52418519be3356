"""A form holds from where the reasoning ends: at every front door, whether the prompt opens the
reasoning, the model, or nobody; the same tokens alone, in a crowd, in chunks, with KV that is
swapped or recomputed, and after kill -9 of the core."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.params import StructuredOutputsParams
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

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"const": "an extraordinary animal"}, "size": {"enum": [10, 2000]}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
TAG = {"type": "structural_tag", "format": {
    "type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]{3}"},
    "end": "</a>"}}  # fmt: skip
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": BY_SCHEMA}, r'\{\s*"kind"\s*:\s*"an ext\w+ animal"\s*,\s*"size".*\}'),
    ({"structured_outputs": {"choice": ["yes, of course", "no"]}}, r"yes, of course|no"),
    ({"structured_outputs": {"regex": "[a-f]{2}-[0-9]{4}"}}, r"[a-f]{2}-[0-9]{4}"),
    ({"structured_outputs": {"grammar": 'root ::= "(" root ")" | [0-9]'}}, r"\(*[0-9]\)*"),
    ({"structured_outputs": {"grammar": 'start: A "!"\nA: /[xy]{3}/'}}, r"[xy]{3}!"),
    ({"structured_outputs": {"structural_tag": TAG}}, r"<a>[0-9]{3}</a>"),
]
BUDGET = 12
BANNED = {str(OPEN): -100, str(CLOSE): -100}
REASONING = {"opening": "<think>", "closing": "</think>", "is_open": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_thinking_model(tmp_path_factory.mktemp("thinking") / "model"))


def options(model: str) -> dict[str, Any]:
    return {"model": model, "served_model_name": "m", "max_model_len": 2048}


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, max_model_len=2048) as made:
        yield made


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[RoutesServer]:
    with asyncio.Runner() as runner:
        made = RoutesServer(runner, options(model))
        yield made
        made.close()


def reply(server: RoutesServer, form: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The one choice of a chat that reasons for `BUDGET` tokens."""
    body = {
        **ASK, "temperature": 1, "max_tokens": 200, "logit_bias": BANNED,
        "thinking_token_budget": BUDGET, "return_token_ids": True, **form, **fields,
    }  # fmt: skip
    return server.ask(CHAT, body)["choices"][0]


@pytest.mark.parametrize(("form", "pattern"), FORMS)
def test_a_form_begins_after_the_reasoning(
    server: RoutesServer, form: dict[str, Any], pattern: str
) -> None:
    choice = reply(server, form)
    message = choice["message"]
    assert message["reasoning"] and choice["finish_reason"] == "stop", choice
    assert re.fullmatch(pattern, message["content"]), message
    assert choice["token_ids"].index(CLOSE) == BUDGET, "the budget counts"
    hidden = reply(server, form, include_reasoning=False)
    assert hidden["token_ids"] == choice["token_ids"]
    assert hidden["message"]["content"] == message["content"]
    assert "reasoning" not in hidden["message"]


def test_the_model_opens_the_reasoning_or_answers_at_once(server: RoutesServer) -> None:
    form = {"response_format": BY_SCHEMA, "chat_template_kwargs": {}, "temperature": 0}
    choice = reply(server, form, logit_bias={str(OPEN): 100, str(CLOSE): -100})
    assert choice["token_ids"][0] == OPEN and choice["token_ids"][BUDGET + 1] == CLOSE
    assert json.loads(choice["message"]["content"])["kind"] == "an extraordinary animal"
    choice = reply(server, form)
    assert OPEN not in choice["token_ids"] and "reasoning" not in choice["message"]
    assert json.loads(choice["message"]["content"])["kind"] == "an extraordinary animal"


def test_a_template_that_is_told_not_to_reason(server: RoutesServer) -> None:
    likes = {str(OPEN): 100}
    for told in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ):
        form = {"chat_template_kwargs": {}, "response_format": BY_SCHEMA, **told}
        choice = reply(server, form, logit_bias=likes)
        assert OPEN not in choice["token_ids"], told
        assert json.loads(choice["message"]["content"])


def test_the_operator_may_have_forms_hold_at_once(model: str) -> None:
    with asyncio.Runner() as runner:
        server = RoutesServer(runner, options(model), enable_in_reasoning=True)
        try:
            form = {"response_format": BY_SCHEMA, "chat_template_kwargs": {}}
            choice = reply(server, form, logit_bias={str(OPEN): 100})
            assert OPEN not in choice["token_ids"] and json.loads(choice["message"]["content"])
            choice = reply(server, {"response_format": BY_SCHEMA})
            assert CLOSE not in choice["token_ids"], "all of it is read as reasoning"
            assert json.loads(choice["message"]["reasoning"])
        finally:
            server.close()


def test_every_front_door(server: RoutesServer, llm: LLM) -> None:
    form = {"json": SCHEMA}
    fields = {
        "structured_outputs": form, "temperature": 1, "seed": 3, "max_tokens": 200,
        "thinking_token_budget": BUDGET, "logit_bias": BANNED,
    }  # fmt: skip
    expected = reply(server, {"structured_outputs": form})["token_ids"]
    assert expected[BUDGET] == CLOSE and len(expected) > BUDGET + 5
    ids = opened(llm)
    params = SamplingParams(
        **fields | {
            "structured_outputs": StructuredOutputsParams(json=SCHEMA, reasoning=REASONING),
            "logit_bias": {OPEN: -100, CLOSE: -100},
        }
    )  # fmt: skip
    assert tokens_of(llm, [ids], [params])[0][0][0] == expected
    body = server.ask("/v1/completions", {"prompt": ids, "return_token_ids": True, **fields})
    assert body["choices"][0]["token_ids"] == expected
    body = server.ask("/inference/v1/generate", {"token_ids": ids, "sampling_params": fields})
    assert body["choices"][0]["token_ids"] == expected
    rendered = server.ask(CHAT + "/render", {**ASK, **fields})
    body = server.ask("/inference/v1/generate", rendered)
    assert body["choices"][0]["token_ids"] == expected
    body = server.ask("/v1/responses", {
        "input": TURNS[0]["content"], "chat_template_kwargs": {"enable_thinking": True},
        "text": {"format": {"type": "json_schema", "name": "animal", "schema": SCHEMA}},
        "max_output_tokens": 200, "temperature": 1, "seed": 3,
        "thinking_token_budget": BUDGET, "logit_bias": BANNED,
    })  # fmt: skip
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == BUDGET
    assert json.loads(body["output"][-1]["content"][0]["text"])["kind"]


def crowd() -> list[SamplingParams]:
    """Forms in all kinds of company; the reasoning ends by its budget, or by chance."""
    forms: list[dict[str, Any]] = [
        {"json": SCHEMA},
        {"choice": ["yes, of course, at any time", "no"]},
        {"regex": "[a-z ]{40,60}[0-9]{4}"},
        {"grammar": 'root ::= "(" root ")" | [0-9]{3}'},
        {"structural_tag": TAG},
    ]
    more: list[dict[str, Any]] = [
        {"thinking_token_budget": 90},
        {"thinking_token_budget": 25, "logprobs": 2},
        {"logit_bias": {CLOSE: 9.0}, "n": 2},
        {"thinking_token_budget": 0, "bad_words": ["the"], "repetition_penalty": 1.2},
    ]
    return [
        SamplingParams(
            temperature=1.0, seed=10 * i + k, max_tokens=300, **fields,
            structured_outputs=StructuredOutputsParams(**form, reasoning=REASONING),
        )
        for i, form in enumerate(forms)
        for k, fields in enumerate(more)
    ]  # fmt: skip


def test_the_same_tokens_alone_in_a_crowd_in_chunks_and_preempted(model: str, llm: LLM) -> None:
    params = crowd()
    alone = same_in_all_company(model, llm, params, num_blocks=60, max_model_len=800)
    ended = [tokens.count(CLOSE) for got in alone for tokens, why in got if why == "stop"]
    assert len(ended) > len(params) // 2 and set(ended) == {1}


def test_forced_text_after_the_reasoning_costs_no_passes(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = count_steps(llm, monkeypatch)
    form = StructuredOutputsParams(
        regex="[ab]ll of it is text that nobody would choose to write", reasoning=REASONING
    )
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=200, structured_outputs=form,
        thinking_token_budget=9, logit_bias={CLOSE: -100},
    )  # fmt: skip
    ((got, why),) = tokens_of(llm, [opened(llm)], [params])[0]
    assert why == "stop" and len(got) > 22 and got[9] == CLOSE
    # One prompt, nine tokens of reasoning of which the mark follows the last, and few free ones.
    assert (found := steps()) <= 9 + 6, (found, len(got))


def test_kill_9_of_the_core(server: RoutesServer, llm: LLM) -> None:
    """Within the reasoning, and within the form."""
    ids = opened(llm)
    params = SamplingParams(
        temperature=1.0, seed=9, max_tokens=1500, thinking_token_budget=150,
        logit_bias={CLOSE: -100, OPEN: -100},
        structured_outputs=StructuredOutputsParams(
            regex="[a-z ]{3000,3040}[0-9]{4}", reasoning=REASONING
        ),
    )  # fmt: skip
    ((expected, why),) = tokens_of(llm, [ids], [params])[0]
    assert expected[150] == CLOSE and len(expected) > 600 and why == "stop"

    assert killed_twice(server, ids, params, (60, 200)) == expected
