"""What docs/compatibility.md calls working has an effect, and what it calls refused is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

import compatibility
import drop_in
from compatibility import REFUSED, WORKS
from fake_engine import FakeEngine
from quire import LLM, SamplingParams
from quire.config import ServerConfig
from quire.errors import NotAvailable
from quire.params import NOT_DONE
from quire.serving.absent_routes import ABSENT_ROUTES
from quire.serving.app import ROUTES, build_app
from quire.serving.server_state import ServerState

TESTS = Path(__file__).resolve().parents[1]
PARTS = {part.title: part.rows for part in compatibility.parts(drop_in.SURFACE)}
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "look", "parameters": SCHEMA}
STREAM = {"stream": True}


def test_every_name_works_or_is_refused_with_a_reason():
    assert compatibility.undecided(drop_in.SURFACE) == []
    assert all(row.why for rows in PARTS.values() for row in rows if row.state == REFUSED)
    assert len(PARTS["Starred flags"]) == 61 and len(PARTS["Members of `SamplingParams`"]) == 50


def test_a_name_that_is_neither_is_found():
    surface = {**drop_in.SURFACE, "starred": ["--no-such-flag"], "environment": ["VLLM_NO_SUCH"]}
    surface["routes_of_other_modes"] = {"POST /nowhere": [], "POST /tokenize": ["no_such_field"]}
    assert compatibility.undecided(surface) == [
        "Starred flags: --no-such-flag",
        "Routes: POST /nowhere",
        "Fields of `POST /tokenize`: no_such_field",
        "Environment variables: VLLM_NO_SUCH",
    ]


# ---- flags, variables, members -------------------------------------------------------------------

FLAG_VALUES = {"--trust-remote-code": [], "--enable-expert-parallel": [], "--enable-lora": [],
               "--async-scheduling": [], "--hf-token": ["x"],
               "--distributed-executor-backend": ["ray"],
               "--lora-modules": ["a=b"], "--limit-mm-per-prompt": ['{"image": 2}'],
               "--speculative-config": ['{"method": "ngram"}'],
               "--kv-transfer-config": ['{"kv_connector": "x"}'],
               "--compilation-config": ['{"mode": 3}']}  # fmt: skip


@pytest.mark.parametrize("name", [r.name for r in PARTS["Starred flags"] if r.state == REFUSED])
def test_a_refused_flag_is_refused_with_that_reason(name: str) -> None:
    told = drop_in.starts([name, *FLAG_VALUES.get(name, ["3"])])
    if name == "--trust-remote-code":
        assert told is None, "it permits what quire never does"
        return
    row = next(row for row in PARTS["Starred flags"] if row.name == name)
    assert told is not None and name in told
    assert row.why.partition(";")[0][:30] in told


@pytest.mark.parametrize("row", PARTS["Environment variables"], ids=lambda row: row.name)
def test_a_variable(row: compatibility.Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire import envs

    monkeypatch.setenv(row.name, "1")
    told = [line for line in envs.without_effect() if line.startswith(f"{row.name} is set")]
    assert len(told) == (row.state == REFUSED)
    assert not told or row.why.removesuffix(" (a warning at the start)") in told[0]


@pytest.mark.parametrize(
    ("kind", "title"), [(LLM, "Methods of `LLM`"), (SamplingParams, "Members of `SamplingParams`")]
)
def test_a_refused_member_says_why(kind: type, title: str) -> None:
    for row in PARTS[title]:
        found = getattr(kind, row.name)
        if row.state == REFUSED and row.name not in NOT_DONE:
            with pytest.raises(NotAvailable, match=f"{row.name} is not available") as caught:
                found(None)
            assert row.why in str(caught.value)
        else:
            assert not hasattr(found, "refused")


# ---- routes --------------------------------------------------------------------------------------


async def ask(path: str, body: dict[str, Any], reply: str = "Hey") -> tuple[int, Any, Any]:
    """Status, body without what differs between equal requests, and what the engine got."""
    engine = FakeEngine(reply=reply)
    state = ServerState(ServerConfig(), engine)
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(path, json=body, headers={"X-Request-Id": "0" * 32})
    if "text/event-stream" in answer.headers["content-type"]:
        return answer.status_code, answer.text.count("usage"), engine.submitted
    made = answer.json()
    for name in ("created", "created_at", "completed_at"):
        made.pop(name, None)
    return answer.status_code, made, engine.submitted


async def test_a_refused_route_says_why() -> None:
    for path, why in ABSENT_ROUTES.items():
        status, body, _ = await ask(path, {})
        assert status == 404 and why in body["error"]["message"]
        assert path not in ROUTES, "it exists now: delete its row"


# ---- fields --------------------------------------------------------------------------------------

MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 16},
}
Sample = tuple[Any, dict[str, Any]]
SAMPLES: dict[str, Sample] = {
    # field: a value, and what else the body needs for it
    "add_special_tokens": (True, {}), "allowed_token_ids": ([5, 6], {}), "bad_words": (["x"], {}),
    "cache_salt": ("s", {}),
    "echo": (True, {"messages": [USER, {"role": "assistant", "content": "he"}],
                    "add_generation_prompt": False, "continue_final_message": True}),
    "frequency_penalty": (1.5, {}), "ignore_eos": (True, {}),
    "include_stop_str_in_output": (True, {}),
    "logit_bias": ({"5": 3}, {}), "logprob_token_ids": ([5], {}), "logprobs": (True, {}),
    "max_completion_tokens": (2, {}), "max_tokens": (2, {}), "messages": ([USER, USER], {}),
    "min_p": (0.5, {}), "min_tokens": (2, {}), "model": ("org/small", {}), "n": (2, {}),
    "presence_penalty": (1.5, {}), "priority": (5, {}), "prompt_logprobs": (1, {}),
    "repetition_detection": ({"max_pattern_size": 3, "min_count": 2}, {}),
    "repetition_penalty": (1.5, {}), "request_id": ("mine", {}),
    "response_format": ({"type": "json_object"}, {}), "return_token_ids": (True, {}),
    "return_tokens_as_token_ids": (True, {"logprobs": True}), "seed": (5, {}),
    "skip_special_tokens": (False, {}), "spaces_between_special_tokens": (False, {}),
    "stop": ("x", {}), "stop_token_ids": ([5], {}), "stream": (True, {}),
    "stream_interval": (3, {}), "stream_options": ({"include_usage": True}, STREAM),
    "structured_outputs": ({"regex": "a"}, {}), "temperature": (0.1, {}),
    "thinking_token_budget": (5, {}), "tools": ([{"type": "function", "function": FUNCTION}], {}),
    "tool_choice": ("required", {"tools": [{"type": "function", "function": FUNCTION}]}),
    "top_k": (3, {}), "top_logprobs": (2, {"logprobs": True}), "top_p": (0.5, {}),
    "truncate_prompt_tokens": (1, {}), "truncation_side": ("right", {"truncate_prompt_tokens": 1}),
    "use_beam_search": (True, {"temperature": 0}), "vllm_xargs": ({"a": 1}, {}),
}  # fmt: skip
OF_ROUTES: dict[str, dict[str, Sample]] = {
    "/v1/completions": {
        "add_special_tokens": (False, {}), "logprobs": (2, {}), "prompt": ("other", {}),
        "echo": (True, {}), "return_tokens_as_token_ids": (True, {"logprobs": 1}),
        "logprob_token_ids": ([5], {"logprobs": 1}),
    },
    "/v1/responses": {
        "background": (True, {}), "include": (["message.output_text.logprobs"], {}),
        "input": ("other", {}), "instructions": ("Be.", {}), "max_output_tokens": (2, {}),
        "parallel_tool_calls": (False, {}), "previous_response_id": ("resp_1", {}),
        "reasoning": ({"effort": "low"}, {}), "store": (False, {}),
        "text": ({"format": {"type": "json_object"}}, {}),
        "tools": ([{"type": "function", **FUNCTION}], {}),
        "tool_choice": ("required", {"tools": [{"type": "function", **FUNCTION}]}),
        "top_logprobs": (2, {}),
    },
    "/v1/messages": {
        "stop_sequences": (["x"], {}), "system": ("Be.", {}),
        "output_config": ({"format": {"type": "json_schema", "schema": SCHEMA}}, {}),
        "tools": ([{"name": "look", "input_schema": SCHEMA}], {}),
        "tool_choice": ({"type": "any"}, {"tools": [{"name": "look", "input_schema": SCHEMA}]}),
    },
}  # fmt: skip
ELSEWHERE = {
    "add_generation_prompt": "serving/test_template_rendering.py",
    "chat_template_kwargs": "serving/test_chat.py",
    "documents": "serving/test_chat.py",
    "continue_final_message": "serving/test_template_rendering.py",
    "include_reasoning": "serving/test_tools.py",
    "length_penalty": "e2e/test_beam_search_server.py",
    "parallel_tool_calls": "serving/test_tools.py",
    "reasoning_effort": "serving/test_tools.py",
    "thinking": "serving/test_messages.py",
}
"""Fields whose effect needs a template or a model of its own, and where it is tested."""
NAMED = [
    (path, row)
    for path in MINIMAL
    for row in PARTS[f"Fields of `POST {path}`"]
    if not (row.state == WORKS and row.why)
]


@pytest.mark.parametrize(("path", "row"), NAMED, ids=lambda value: getattr(value, "name", value))
async def test_a_field_has_an_effect_or_is_refused(path: str, row: compatibility.Verdict) -> None:
    if row.state == REFUSED:
        status, body, submitted = await ask(path, MINIMAL[path] | {row.name: {"any": "thing"}})
        assert status == 400 and row.name in str(body["error"]) and not submitted
        return
    sample = OF_ROUTES.get(path, {}).get(row.name) or SAMPLES.get(row.name)
    if sample is None:
        assert row.name in (TESTS / ELSEWHERE[row.name]).read_text("utf-8")
        return
    value, context = sample
    plain = await ask(path, MINIMAL[path] | context)
    assert plain[0] == 200, plain
    given = await ask(path, MINIMAL[path] | context | {row.name: value})
    assert given != plain, f"{row.name} is accepted and ignored"
    assert given[0] == 200 or row.name in str(given[1]["error"]), given[1]
