"""`/v1/messages`: the order and fields of its events, whole replies, and every refusal."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

import toy_parsers as toys
from fake_engine import FakeEngine
from named_events import events, scripted_server
from quire.config import ServerConfig
from quire.errors import StepFailed, TooManyRequests
from quire.params import StructuredOutputsParams
from quire.serving.app import build_app
from quire.serving.server_state import ServerState

BODY: dict[str, Any] = {"max_tokens": 400, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "map", "description": "d", "input_schema": {"type": "object", "properties": {}}}


async def post(client: httpx.AsyncClient, **body: Any) -> Any:
    reply = await client.post("/v1/messages", json=BODY | body)
    assert reply.status_code == 200, reply.text
    return events(reply.text) if body.get("stream") else reply.json()


def folded(streamed: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from a stream."""
    message = streamed[0]["message"]
    pieces: dict[int, list[str]] = {}
    for event in streamed[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                for name in ("text", "thinking", "signature"):
                    if name in delta:
                        block[name] += delta[name]
                if "partial_json" in delta:
                    pieces.setdefault(event["index"], []).append(delta["partial_json"])
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    for index, texts in pieces.items():
        message["content"][index]["input"] = json.loads("".join(texts))
    return message


def without_id(message: dict[str, Any]) -> dict[str, Any]:
    content = [{k: v for k, v in b.items() if k != "id"} for b in message["content"]]
    return {k: v for k, v in message.items() if k != "id"} | {"content": content}


async def test_the_golden_sequence_of_text(client: httpx.AsyncClient) -> None:
    usage = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 2}
    prompt = len("<user>hi<assistant>") - 2
    first, *others = await post(client, stream=True)
    message_id = first["message"].pop("id")
    assert message_id.startswith("msg_")
    assert first == {
        "type": "message_start",
        "message": {
            "type": "message",
            "role": "assistant",
            "model": "quire-demo",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt, "output_tokens": 1, **usage},
        },
    }

    def delta(text: str) -> dict[str, Any]:
        delta = {"type": "text_delta", "text": text}
        return {"type": "content_block_delta", "index": 0, "delta": delta}

    block = {"type": "text", "text": ""}
    assert others == [
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "ping"},
        delta("H"),
        delta("e"),
        delta("y"),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"input_tokens": prompt, "output_tokens": 3, **usage},
        },
        {"type": "message_stop"},
    ]


async def test_the_golden_sequence_of_thoughts_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _, _ = scripted_server(monkeypatch, [toys.TEXT], ["thoughts", "toy"])
    async with client:
        streamed = await post(client, stream=True, tools=[TOOL], thinking={"type": "adaptive"})
        whole = await post(client, tools=[TOOL])
        hidden = await post(
            client, stream=True, thinking={"type": "adaptive", "display": "omitted"}
        )
    kinds: list[Any] = []
    for event in streamed:
        kind = (event["type"], event.get("delta", {}).get("type") or event.get("index"))
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert kinds == [
        ("message_start", None),
        (start, 0), ("ping", None), (delta, "thinking_delta"), (delta, "signature_delta"),
        (stop, 0),
        (start, 1), (delta, "text_delta"), (stop, 1),
        (start, 2), (delta, "input_json_delta"), (stop, 2),
        (start, 3), (delta, "text_delta"), (stop, 3),
        (start, 4), (stop, 4),
        (start, 5), (delta, "input_json_delta"), (stop, 5),
        (start, 6), (delta, "text_delta"), (stop, 6),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    begun = [e["content_block"] for e in streamed if e["type"] == start]
    assert begun[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert begun[2]["id"].startswith("toolu_")
    assert {**begun[2], "id": ""} == {"type": "tool_use", "id": "", "name": "map", "input": {}}
    assert without_id(folded(streamed)) == without_id(whole)
    assert whole["stop_reason"] == "tool_use"
    blocks = [(b["type"], b.get("text") or b.get("thinking") or b["input"]) for b in
              whole["content"]]  # fmt: skip
    assert blocks == [
        ("thinking", "Größe?"),
        ("text", " So [x] it is. "),
        ("tool_use", {"city": "Köln [0]"}),
        ("text", " and "),
        ("tool_use", {}),
        ("tool_use", {"a": [1]}),
        ("text", " [[half"),
    ]
    assert whole["content"][0]["signature"]
    thought = folded(hidden)["content"][0]
    assert thought["thinking"] == "" and thought["signature"] == whole["content"][0]["signature"]


async def test_a_call_that_is_cut_short_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _, _ = scripted_server(monkeypatch, ['[[map|{"city": "Kö'], ["toy"])
    async with client:
        whole = await post(client, tools=[TOOL])
    assert whole["content"][0]["input"] == {"INVALID_JSON": '{"city": "Kö'}


@pytest.mark.parametrize("stream", [False, True])
async def test_why_a_message_ended(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _, _ = scripted_server(monkeypatch, ["one two three four five"])

    async def end(**body: Any) -> tuple[str, str | None]:
        got = await post(client, stream=stream, **body)
        message = folded(got) if stream else got
        return message["stop_reason"], message["stop_sequence"]

    async with client:
        assert await end() == ("end_turn", None)
        assert await end(stop_sequences=[" three", "x"]) == ("stop_sequence", " three")
        assert await end(max_tokens=2) == ("max_tokens", None)


async def test_a_full_context_is_told_apart(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    # The fake engine ends at the length of its reply or at max_tokens: say it ended by length.
    engine.output = _by_length(engine.output)  # type: ignore[method-assign]
    assert (await post(client, max_tokens=3))["stop_reason"] == "max_tokens"
    whole = await post(client, max_tokens=300)
    assert whole["stop_reason"] == "model_context_window_exceeded"


def _by_length(output: Any) -> Any:
    def by_length(*args: Any, **kwargs: Any) -> Any:
        made = output(*args, **kwargs)
        for completion in made.outputs:
            completion.finish_reason = completion.finish_reason and "length"
        return made

    return by_length


async def test_the_conversation_reaches_the_template(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "let me see"},
            {"type": "tool_use", "id": "toolu_1", "name": "map", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": False,
             "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "shine"}]},
            {"type": "text", "text": "well?", **cached},
        ]},
        {"role": "assistant", "content": "So"},
    ]  # fmt: skip
    seen: list[Any] = []
    render = engine.tokenizer.apply_chat_template

    def spy(turns: Any, **kwargs: Any) -> str:
        seen.append((turns, kwargs))
        return render(turns, **kwargs)

    engine.tokenizer.apply_chat_template = spy  # type: ignore[method-assign]
    body = {
        "messages": messages,
        "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind", **cached}],
        "tools": [TOOL | cached],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "output_config": {"effort": "low"},
        "chat_template_kwargs": {"x": 1},
        "cache_control": {"type": "ephemeral"},
    }
    await post(client, **body, metadata={"user_id": "u"}, cache_salt="s")
    turns, kwargs = seen[0]
    function = {"name": "map", "arguments": {"a": 1}}
    assert turns == [
        {"role": "system", "content": "be\nkind"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "let me see", "reasoning": "hm",
         "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sun\nshine"},
        {"role": "user", "content": "well?"},
        {"role": "assistant", "content": "So"},
    ]  # fmt: skip
    parameters = TOOL["input_schema"]
    shown = {"name": "map", "description": "d", "parameters": parameters}
    assert kwargs == {
        "tools": [{"type": "function", "function": shown}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "enable_thinking": True,
        "thinking": True,
        "reasoning_effort": "low",
        "x": 1,
    }
    assert engine.submitted[0][4] == "s"
    reply = await client.post("/v1/messages/count_tokens", json=body)
    assert reply.json() == {"input_tokens": len(engine.submitted[0][0])}
    assert seen[1] == seen[0]
    await post(client, tools=[TOOL], tool_choice={"type": "none"})
    assert seen[2][1]["tools"] is None


async def test_a_form_reaches_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    schema = {"type": "object"}
    await post(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert engine.submitted[0][1].structured_outputs == StructuredOutputsParams(json=schema)


async def test_parameters_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post(client, temperature=0.5, top_p=0.9, top_k=7, seed=3, stop_sequences=["a", "b"])
    params = engine.submitted[0][1]
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, 3)
    assert params.stop == ["a", "b"] and params.max_tokens == 400


def _says(kind: str, **more: Any) -> Any:
    return [{"role": "user", "content": [{"type": kind, **more}]}]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "max_tokens must be an integer"),
    ({"max_tokens": 0}, "max_tokens", "got 0"),
    ({"max_tokens": "5"}, "max_tokens", 'got "5"'),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": "hi"}, "messages", "must be an array"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", '"tool"'),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got 5"),
    ({"messages": _says("image", source={})}, "messages[0].content[0].type", "text only"),
    ({"messages": _says("document", source={})}, "messages[0].content[0].type", "document"),
    ({"messages": _says("redacted_thinking", data="x")}, "messages[0].content[0].type", "read it"),
    ({"messages": _says("video")}, "messages[0].content[0].type", '"video"'),
    ({"messages": _says("text")}, "messages[0].content[0].text", "is required"),
    ({"messages": _says("text", text=5)}, "messages[0].content[0].text", "got 5"),
    ({"messages": _says("text", text="x", txet="y")}, "messages[0].content[0].txet", "`text`"),
    ({"messages": _says("text", text="x", cache_control={"type": "forever"})},
     "messages[0].content[0].cache_control.type", '"forever"'),
    ({"messages": _says("tool_result", tool_use_id="x", content=[{"type": "image"}])},
     "messages[0].content[0].content[0].type", "text only"),
    ({"messages": _says("tool_use", id="x", name="x", input={})},
     "messages[0].content[0].type", "tool_use"),
    ({"system": [{"type": "image"}]}, "system[0].type", "text only"),
    ({"system": 5}, "system", "got 5"),
    ({"stop_sequences": "x"}, "stop_sequences", "must be an array"),
    ({"stop_sequences": [""]}, "stop_sequences", "stop_sequences"),
    ({"temperature": 9}, "temperature", "got 9"),
    ({"top_k": -5}, "top_k", "got -5"),
    ({"stream": 1}, "stream", "true or false"),
    ({"metadata": {"user": "x"}}, "metadata.user", "Unknown field"),
    ({"metadata": {"user_id": "x" * 1025}}, "metadata.user_id", "1025"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "web"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "is required"),
    ({"tools": [TOOL | {"name": ""}]}, "tools[0].name", "non-empty"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading", "true"),
    ({"tool_choice": {"type": "maybe"}}, "tool_choice.type", '"maybe"'),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "is required"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "is required"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens", "got 5"),
    ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens", "true"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type", "between_tools"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort", '"huge"'),
    ({"output_config": {"fromat": {}}}, "output_config.fromat", "`format`"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", '"text"'),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"a": "x" * 300000}}}},
     "output_config.format.schema", "output_config.format.schema must be at most"),
    ({"service_tier": "priority"}, "service_tier", "tiers"),
    ({"container": "x"}, "container", "containers"),
    ({"context_management": {"edits": []}}, "context_management", "client decides"),
    ({"priority": 2**63}, "priority", f"got {2**63}"),
    ({"cache_salt": ""}, "cache_salt", "empty"),
    ({"max_token": 5}, "max_token", "`max_tokens`"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "words"), WRONG, ids=lambda v: str(v)[:40])
async def test_what_is_wrong_is_named(
    body: dict[str, Any], param: str, words: str, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    reply = await client.post("/v1/messages", json=BODY | body)
    assert reply.status_code == 400, reply.text
    told = reply.json()
    assert list(told) == ["type", "error", "request_id"]
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert told["error"]["param"] == param
    assert words in told["error"]["message"]
    assert not engine.submitted


async def test_errors_have_its_form_wherever_they_arise(engine: FakeEngine) -> None:
    state = ServerState(ServerConfig(api_key=["k"]), engine)
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def error(method: str = "POST", path: str = "/v1/messages", **how: Any) -> Any:
            how = {"headers": {"x-api-key": "k"}, "json": BODY} | how
            reply = await client.request(method, path, **how)
            told = reply.json()
            assert told["type"] == "error" and told["request_id"] == reply.headers["request-id"]
            assert set(told["error"]) >= {"type", "message"}
            return reply.status_code, told["error"]["type"]

        assert await error(headers={}) == (401, "authentication_error")
        assert await error(path="/v1/messages/batches") == (404, "not_found_error")
        assert await error(path="/v1/messages/x", headers={}) == (401, "authentication_error")
        assert await error("GET") == (405, "invalid_request_error")
        assert await error(json=BODY | {"model": "gpt"}) == (404, "not_found_error")
        key = {"x-api-key": "k"}
        assert await error(headers=key | {"content-type": "text/plain"}) == (
            415,
            "invalid_request_error",
        )
        assert await error(headers=key | {"anthropic-version": "new"}) == (
            400,
            "invalid_request_error",
        )
        engine.refuse = TooManyRequests("full", retry_after=2)
        assert await error() == (429, "rate_limit_error")
        engine.refuse = StepFailed("broken")
        assert await error() == (500, "api_error")
        engine.refuse = None
        state.draining = True
        assert await error() == (503, "overloaded_error")
        state.draining = False
        for path in ("/v1/messagesx", "/v1/chat/messages"):  # of others
            reply = await client.post(path, json=BODY, headers=key)
            assert reply.status_code == 404 and "type" not in reply.json()
        bearer = {"authorization": "Bearer k", "anthropic-version": "2023-06-01"}
        reply = await client.post("/v1/messages", json=BODY, headers=bearer)
        assert reply.status_code == 200 and reply.headers["request-id"]


async def test_a_stream_that_fails_ends_with_an_error_event(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.break_after = 2
    streamed = await post(client, stream=True)
    assert [event["type"] for event in streamed[-3:]] == ["content_block_delta"] * 2 + ["error"]
    assert streamed[-1]["error"]["type"] == "api_error" and streamed[-1]["request_id"]
    assert "secret" not in json.dumps(streamed)
