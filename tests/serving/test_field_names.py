"""Errors about the form of an output, and what else the engine refuses, name the caller's own
fields, in every API, when a request is submitted and after its first byte."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine, FakeStream
from quire.config import ServerConfig
from quire.errors import InvalidRequest
from quire.outputs import CompletionOutput, RequestOutput
from quire.params import SamplingParams
from quire.serving.app import build_app
from quire.serving.prompts import TEXT_MARGIN
from quire.serving.server_state import ServerState
from quire.structured.schema import schema_text
from quire.structured.settle import settle

BAD: dict[str, Any] = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
GOOD: dict[str, Any] = {"type": "object", "properties": {}}
HUGE: dict[str, Any] = {"enum": ["x" * 300_000]}
USER = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BATCH, TOKENS = "/v1/chat/completions/batch", "/inference/v1/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


class StrictEngine(FakeEngine):
    """Settles grammars as the input gate does, up to the compiler."""

    compiler: str | None = None
    """What the compiler finds wrong, if something."""
    refusal: InvalidRequest | None = None
    """What the input gate refuses, if something."""

    async def submit(
        self, prompt: list[int], params: Any, request_id: str, **more: Any
    ) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        wanted = getattr(params, "structured_outputs", None)
        if wanted is not None:
            settle(wanted, {})
            if self.compiler is not None:
                param = f"structured_outputs.{wanted.kind}"
                raise InvalidRequest(f"{param}: {self.compiler}", param=param)
        return await super().submit(prompt, params, request_id, **more)


@pytest.fixture
def engine() -> StrictEngine:
    return StrictEngine()


def _function(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def _format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _tools(bad: Any, **more: Any) -> dict[str, Any]:
    return {"tools": [_function("one", GOOD), _function("two", bad, **more)]}


def _flat(bad: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function", "name": name, "parameters": schema}
        for name, schema in (("one", GOOD), ("two", bad))
    ]


def _own(bad: Any) -> list[dict[str, Any]]:
    return [{"name": "one", "input_schema": GOOD}, {"name": "two", "input_schema": bad}]


SCHEMA_AT = "response_format.json_schema.schema"
PLACES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"response_format": _format(BAD)}, SCHEMA_AT),
    (CHAT, {"structured_outputs": {"json": BAD}}, "structured_outputs.json"),
    (CHAT, {"guided_json": BAD}, "guided_json"),
    (CHAT, {**_tools(BAD), "tool_choice": "required"}, "tools[1].function.parameters"),
    (CHAT, {**_tools(BAD), "tool_choice": {"type": "function", "function": {"name": "two"}}},
     "tools[1].function.parameters"),
    (TEXT, {"response_format": _format(BAD)}, SCHEMA_AT),
    (TEXT, {"guided_json": BAD}, "guided_json"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": BAD}}},
     "text.format.schema"),
    (RESPONSES, {"tools": _flat(BAD), "tool_choice": "required"}, "tools[1].parameters"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
     "output_config.format.schema"),
    (MESSAGES, {"tools": _own(BAD), "tool_choice": {"type": "any"}}, "tools[1].input_schema"),
]  # fmt: skip


def _body(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, dict[str, Any]] = {
        CHAT: {"messages": USER},
        TEXT: {"prompt": "hi"},
        RESPONSES: {"input": "hi"},
        MESSAGES: {"messages": USER, "max_tokens": 9, "model": "quire-demo"},
        BATCH: {"messages": [USER]},
        TOKENS: {"token_ids": [65], "sampling_params": {}},
    }
    return given[path] | fields


async def _refusal(client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> tuple[str, Any]:
    """The error's message and `param`; Anthropic's errors have none."""
    reply = await client.post(path, json=_body(path, fields))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    return error["message"], error.get("param")


@pytest.mark.parametrize(("path", "fields", "place"), PLACES)
@pytest.mark.parametrize("resumable", [False, True])
async def test_a_keyword_that_cannot_be_enforced_is_told_where_it_stands(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], place: str, resumable: bool
) -> None:
    if resumable:
        client.headers["X-Resumable"] = "true"
    message, param = await _refusal(client, path, fields)
    assert message.startswith(f"{place}: #/properties/a has the keyword 'not'"), message
    assert path == MESSAGES or param == place


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (CHAT, {"response_format": _format(GOOD)}, SCHEMA_AT),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"guided_regex": "("}, "guided_regex"),
        (CHAT, {"guided_grammar": "start: /a/"}, "guided_grammar"),
        (CHAT, {"guided_choice": ["a"]}, "guided_choice"),
        (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (CHAT, {**_tools(GOOD), "tool_choice": "required"}, "tools"),
        (CHAT, {"tools": [_function("a", GOOD)], "tool_choice": "required"},
         "tools[0].function.parameters"),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
        (RESPONSES, {"tools": _flat(GOOD), "tool_choice": "required"}, "tools"),
        (MESSAGES, {"tools": _own(GOOD)[:1], "tool_choice": {"type": "any"}},
         "tools[0].input_schema"),
    ],
)  # fmt: skip
async def test_what_the_compiler_says_is_told_of_the_callers_field(
    client: httpx.AsyncClient, engine: StrictEngine, path: str, fields: dict[str, Any], place: str
) -> None:
    engine.compiler = "too large"
    message, param = await _refusal(client, path, fields)
    assert message == f"{place}: too large"
    assert path == MESSAGES or param == place


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (CHAT, {"response_format": _format(HUGE)}, SCHEMA_AT),
        (CHAT, {"guided_json": HUGE}, "guided_json"),
        (CHAT, {"guided_choice": []}, "guided_choice"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": HUGE}}},
         "text.format.schema"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": HUGE}}},
         "output_config.format.schema"),
    ],
)  # fmt: skip
async def test_values_are_refused_by_the_same_names(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], place: str
) -> None:
    message, _ = await _refusal(client, path, fields)
    assert message.startswith(f"{place} must be"), message


@pytest.mark.parametrize(
    ("path", "fields", "engines", "place"),
    [
        (TEXT, {}, "prompt", "prompt"),
        (TEXT, {"logprobs": 1}, "logprobs", "logprobs"),
        (CHAT, {}, "prompt", "messages"),
        (CHAT, {"tools": _tools(GOOD)["tools"], "tool_choice": "required"}, "prompt", "messages"),
        (CHAT, {"response_format": _format(GOOD)}, "prompt", "messages"),
        (CHAT, {"logprobs": True, "top_logprobs": 1}, "logprobs", "top_logprobs"),
        (CHAT, {}, "logit_bias", "logit_bias"),
        (BATCH, {}, "prompt", "messages"),
        (RESPONSES, {}, "prompt", "input"),
        (RESPONSES, {"tools": _flat(GOOD), "tool_choice": "required"}, "prompt", "input"),
        (RESPONSES, {"top_logprobs": 1}, "logprobs", "top_logprobs"),
        (MESSAGES, {}, "prompt", "messages"),
        (TOKENS, {}, "prompt", "token_ids"),
        (TOKENS, {}, "logit_bias", "sampling_params.logit_bias"),
    ],
)
async def test_what_the_gate_refuses_is_told_of_the_callers_field(
    client: httpx.AsyncClient,
    engine: StrictEngine,
    path: str,
    fields: dict[str, Any],
    engines: str,
    place: str,
) -> None:
    engine.refusal = InvalidRequest(f"{engines} must be shorter, got 9.", param=engines)
    message, param = await _refusal(client, path, fields)
    assert (message, param) == (f"{place} must be shorter, got 9.", place)


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (TEXT, lambda text: {"prompt": text}, "prompt"),
        (CHAT, lambda text: {"messages": [{"role": "user", "content": text}]}, "messages"),
        (BATCH, lambda text: {"messages": [USER, [{"role": "user", "content": text}]]},
         "messages[1]"),
        (RESPONSES, lambda text: {"input": text}, "input"),
        (MESSAGES, lambda text: {"system": text}, "messages"),
    ],
)  # fmt: skip
async def test_a_text_that_is_not_worth_tokenising_is_told_of_the_callers_field(
    client: httpx.AsyncClient,
    engine: StrictEngine,
    path: str,
    fields: Callable[[str], dict[str, Any]],
    place: str,
) -> None:
    length = TEXT_MARGIN * engine.max_model_len * engine.tokenizer.longest_token + 1
    message, param = await _refusal(client, path, fields("a" * length))
    assert "characters" in message and param == place


class FailingEngine(FakeEngine):
    """Gives up on a grammar after the first token."""

    def output(
        self,
        stream: FakeStream,
        prompt: list[int],
        params: SamplingParams,
        span: tuple[int, int],
        reason: str | None,
        *rest: Any,
        **more: Any,
    ) -> RequestOutput:
        made = super().output(stream, prompt, params, span, reason, *rest, **more)
        if reason == "error":
            made.outputs = [CompletionOutput(0, "", [], finish_reason="error")]
            made.error = "structured_outputs: the grammar needs more work for one token"
        return made


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {**_tools(GOOD), "tool_choice": "required"}, "tools"),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": GOOD}}},
         "output_config.format"),
    ],
)  # fmt: skip
async def test_an_error_after_the_first_byte_names_the_callers_field(
    path: str, fields: dict[str, Any], place: str
) -> None:
    engine = FailingEngine()
    engine.break_after = 1
    transport = httpx.ASGITransport(build_app(ServerState(ServerConfig(), engine)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        reply = await client.post(path, json=_body(path, fields | {"stream": True}))
    assert reply.status_code == 200
    assert f'"{place}: the grammar needs more work for one token' in reply.text, reply.text
    assert "structured_outputs" not in reply.text


def test_a_schema_is_left_as_it_was_given() -> None:
    given = {"uniqueItems": False, "properties": {"a": {"unevaluatedItems": True}}}
    before = copy.deepcopy(given)
    for close in (False, True):
        text = schema_text(given, close_objects=close)
        assert given == before
        assert "uniqueItems" not in text and "unevaluatedItems" not in text
        assert ("additionalProperties" in json.loads(text)) is close
