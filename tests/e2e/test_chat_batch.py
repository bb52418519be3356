"""Several conversations in one request: each has the choice that it would have alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire.engine.frontend.seeds import prompt_seed
from routes_server import RoutesServer
from thinking_model import make_thinking_model

BATCH, CHAT = "/v1/chat/completions/batch", "/v1/chat/completions"
SUM = [{"role": "user", "content": "What is 23 + 45?"}]
CITY = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
]
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
SAMPLED: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.95, "max_tokens": 80, "logprobs": True, "top_logprobs": 2,
    "return_token_ids": True, "frequency_penalty": 0.2,
}  # fmt: skip
SCHEMA = {
    "type": "object", "properties": {"kind": {"enum": ["small", "large"]}}, "required": ["kind"],
    "additionalProperties": False,
}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[RoutesServer]:
    with asyncio.Runner() as runner:
        made = RoutesServer(runner, {"max_model_len": 1024}, max_n_sequences=5)
        yield made
        made.close()


@pytest.mark.parametrize("seed", [11, None])
def test_each_is_a_request_of_its_own(server: RoutesServer, seed: int | None) -> None:
    asked = [SUM, CITY, STORY, STORY]
    body = server.ask(BATCH, {"messages": asked, **SAMPLED, "seed": seed, "request_id": "mine"})
    assert body["id"] == "chatcmpl-mine" and body["object"] == "chat.completion"
    assert seed in (None, body["seed"])
    alone = [
        server.ask(CHAT, {"messages": one, **SAMPLED, "seed": prompt_seed(body["seed"], i)})
        for i, one in enumerate(asked)
    ]
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice, one in zip(choices, alone, strict=True):
        assert choice == {**one["choices"][0], "index": choice["index"]}
    assert choices[2]["token_ids"] != choices[3]["token_ids"], "its own random numbers"
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert body["usage"][name] == sum(one["usage"][name] for one in alone)
    assert "prompt_token_ids" not in body, "there are several"


def test_answers_are_right_and_have_their_form(server: RoutesServer) -> None:
    body = server.ask(BATCH, {"messages": [SUM, CITY], "temperature": 0})
    answers = [choice["message"]["content"] for choice in body["choices"]]
    assert "68" in answers[0] and "Paris" in answers[1], answers
    body = server.ask(
        BATCH, {"messages": [SUM, CITY, STORY], "response_format": FORM, "temperature": 1.5}
    )
    for choice in body["choices"]:
        assert json.loads(choice["message"]["content"])["kind"] in ("small", "large")
    unfinished = [*SUM, {"role": "assistant", "content": "23 + 45"}]
    fields = {"echo": True, "continue_final_message": True, "temperature": 0}
    body = server.ask(BATCH, {"messages": [unfinished, STORY[:1] + unfinished[1:]], **fields})
    assert all(c["message"]["content"].startswith("23 + 45") for c in body["choices"])


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least one conversation"),
    ({"messages": [SUM, []]}, "messages[1]", "must not be empty"),
    ({"messages": SUM}, "messages[0]", "array"),
    ({"messages": [SUM, [{"role": "x", "content": "a"}]]}, "messages[1][0].role", 'got "x"'),
    ({"messages": [SUM, [{"role": "user", "content": "a", "mood": 1}]]}, "messages[1][0].mood",
     "mood"),
    ({"messages": [SUM] * 6}, "prompt", "at most 5 completions"),
    ({"n": 2}, "n", "one choice"),
    ({"stream": True}, "stream", "whole"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "calls no tools"),
    ({"tool_choice": "auto"}, "tool_choice", "calls no tools"),
    ({"use_beam_search": True}, "use_beam_search", CHAT),
    ({"prompt_logprobs": 1}, "prompt_logprobs", CHAT),
    ({"temperature": 3}, "temperature", "got 3"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "two names"),
    ({"respons_format": {}}, "respons_format", "response_format"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "param", "told"), REFUSED, ids=str)
def test_what_is_refused(server: RoutesServer, more: dict[str, Any], param: str, told: str) -> None:
    """One wrong conversation refuses all, as in vLLM."""
    error = server.ask(BATCH, {"messages": [SUM, STORY], **more}, 400)["error"]
    assert error["param"] == param and told in error["message"], error


def test_what_asks_for_nothing_is_taken(server: RoutesServer) -> None:
    server.ask(
        BATCH,
        {"messages": [SUM], "max_tokens": 2, "n": 1, "best_of": 1, "stream": False, "tools": None,
         "tool_choice": "none", "use_beam_search": False, "length_penalty": 1.0,
         "early_stopping": False, "watermarking": False, "guided_decoding_backend": "auto",
         "mm_processor_kwargs": None, "user": "u"},
    )  # fmt: skip


def test_a_form_begins_where_the_reasoning_of_its_conversation_ends(tmp_path: Any) -> None:
    """One conversation goes on within its reasoning, the other after it."""
    turn = {"role": "assistant", "content": "<think>"}
    done = {"role": "assistant", "content": "<think>\nI see</think>"}
    with asyncio.Runner() as runner:
        model = str(make_thinking_model(tmp_path / "model"))
        server = RoutesServer(runner, {"model": model, "max_model_len": 1024})
        try:
            fields = {"continue_final_message": True, "response_format": FORM, "max_tokens": 60,
                      "thinking_token_budget": 9, "temperature": 1, "seed": 4}  # fmt: skip
            asked = [[*SUM, turn], [*SUM, done]]
            body = server.ask(BATCH, {"messages": asked, **fields})
            alone = [
                server.ask(CHAT, {"messages": one, **fields, "seed": prompt_seed(4, i)})
                for i, one in enumerate(asked)
            ]
            for choice, one in zip(body["choices"], alone, strict=True):
                message = choice["message"]
                assert message == one["choices"][0]["message"]
                assert json.loads(message["content"])["kind"] in ("small", "large")
            reasons = ["reasoning" in choice["message"] for choice in body["choices"]]
            assert reasons == [True, False]
        finally:
            server.close()
