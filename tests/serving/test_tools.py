"""Tools and reasoning over HTTP: what is refused, what the template gets, how replies look."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from quire.config import ServerConfig
from quire.errors import ConfigError, InvalidRequest
from quire.registry import Registry
from quire.serving.app import build_app
from quire.serving.conversation import read_tools
from quire.serving.model_parsers import ModelParsers, choose_parsers
from quire.serving.parsers.think_tags import ThinkTags
from quire.serving.server_state import ServerState
from quire.serving.tools import ToolChoice, tool_spec, tool_use
from scripted_core import scripted_engine

USER = {"role": "user", "content": "What is the weather in Paris?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
Serve = Callable[..., httpx.AsyncClient]


@pytest.fixture
def serve() -> Serve:
    """A server of the embedded model's files, whose model says the given texts."""

    def make(*texts: str, **options: Any) -> httpx.AsyncClient:
        engine, _ = scripted_engine(texts)
        state = ServerState(ServerConfig(**options))
        state.serve(engine)
        transport = httpx.ASGITransport(build_app(state))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost")

    return make


async def chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    reply = await client.post("/v1/chat/completions", json={"messages": [USER], **body})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]  # type: ignore[no-any-return]


async def test_calls_are_found_by_the_syntax_of_the_template(serve: Serve) -> None:
    choice = await chat(serve(f"I see.\n{CALL}\n{CALL}"), tools=[TOOL])
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "I see.")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "get_weather", "arguments": '{"city": "Paris"}'}] * 2


async def test_streams_say_the_name_first_and_then_arguments(serve: Serve) -> None:
    body = {"messages": [USER], "tools": [TOOL], "stream": True}
    reply = await serve(CALL).post("/v1/chat/completions", json=body)
    frames = [json.loads(f[6:])["choices"][0] for f in reply.text.split("\n\n")[:-2]]
    calls = [call for f in frames for call in f["delta"].get("tool_calls", ())]
    first = calls[0]
    assert set(first) == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    assert all(set(call) == {"index", "function"} and call["index"] == 0 for call in calls[1:])
    assert len(calls) > 2, "arguments come as they are generated"
    assert "".join(c["function"]["arguments"] for c in calls) == '{"city": "Paris"}'
    assert frames[-1]["finish_reason"] == "tool_calls"


def allowed(mode: str, *names: Any) -> dict[str, Any]:
    """OpenAI's choice of some tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools(mode: str) -> None:
    """The model is told of these alone, and a grammar keeps it from calls of others."""
    use = read_tools([OTHER, TOOL], allowed(mode, "get_weather"))
    assert use.for_template() == [TOOL] and use.narrowed and use.constrains
    engine, _ = scripted_engine(["x"])
    parsers = choose_parsers(ServerConfig(tool_call_parser="hermes"), [])
    _, params = parsers.parsing("", use, engine.default_params, engine.tokenizer)
    assert params.structured_outputs is not None
    form = params.structured_outputs.structural_tag["format"]  # type: ignore[index]
    assert [tag["begin"].count("get_weather") for tag in form["tags"]] == [1]
    assert form["type"] == ("triggered_tags" if mode == "auto" else "tags_with_separator")
    every = read_tools([OTHER, TOOL], allowed("auto", "now", "get_weather"))
    assert every.for_template() == [OTHER, TOOL] and not every.constrains


async def test_some_of_the_tools_need_a_syntax_that_tells_calls(serve: Serve) -> None:
    client = serve(CALL, tool_call_parser="none")
    body = {"messages": [USER], "tools": [OTHER, TOOL], "tool_choice": allowed("auto", "now")}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and "a part of the tools" in reply.json()["error"]["message"]
    choice = await chat(client, tools=[TOOL], tool_choice=allowed("auto", "get_weather"))
    assert choice["message"]["content"] == CALL


async def test_without_tools_the_text_is_as_it_is(serve: Serve) -> None:
    for body in ({}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}):
        choice = await chat(serve(CALL), **body)
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


async def test_one_call_alone(serve: Serve) -> None:
    client = serve(f"{CALL}{CALL}Well.")
    choice = await chat(client, tools=[TOOL], parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] == "Well."


async def test_reasoning_is_told_or_left_out(serve: Serve) -> None:
    client = serve("<think>Hm.</think>Yes.", reasoning_parser="qwen3")
    message = (await chat(client))["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    assert message["content"] == "Yes."
    message = (await chat(client, include_reasoning=False))["message"]
    assert "reasoning" not in message and message["content"] == "Yes."


class Tagged(ThinkTags):
    """Reasoning between two tokens of the embedded model."""

    opening, closing = "<tool_call>", "</tool_call>"
    thoughts = (opening, closing)


@pytest.mark.parametrize("reasoning", [True, False])
async def test_tokens_of_reasoning_are_counted(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, reasoning: bool
) -> None:
    table = Registry("reasoning parser", {"tagged": Tagged})
    monkeypatch.setattr("quire.serving.model_parsers.REASONING_PARSERS", table)
    text = "<tool_call>Let me see.</tool_call>Yes, it is."
    tokenizer = scripted_engine(["x"])[0].tokenizer
    expected = tokenizer.encode(text, add_special_tokens=False).index(4)
    for said, count in ((text, expected), ("Yes.", None)):
        client = serve(said, said, reasoning_parser="tagged")
        body = {"messages": [USER], "include_reasoning": reasoning, "n": 2, "temperature": 1}
        usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
        details = usage.get("completion_tokens_details")
        assert details == (count and {"reasoning_tokens": 2 * count})
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        reply = await client.post("/v1/chat/completions", json=body)
        assert json.loads(reply.text.split("\n\n")[-3][6:])["usage"] == usage


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name", ["another tool", "get_weather"]),
        ({"tools": [TOOL] * 513}, "tools", ["512", "513"]),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]},
         "tools[0].function.name", ["128", '"a b"']),
        ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]},
         "tools[0].function.name", ["128"]),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
         "tools[0].function.parameters", ["object", "[1]"]),
        ({"tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"type": "array"}}}]},
         "tools[0].function.parameters.type", ['"object"', '"array"']),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]},
         "tools[0].function.description", ["string", "5"]),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", ["required", '"always"']),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
         "tool_choice", ['"g"', "not among"]),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
         "tool_choice.allowed_tools", ["mode", "null"]),
        ({"tools": [TOOL], "tool_choice": allowed("named", "get_weather")},
         "tool_choice.allowed_tools", ["required", '"named"']),
        ({"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice", ["at least one"]),
        ({"tools": [TOOL], "tool_choice": allowed("auto", "get_weather", "g")},
         "tool_choice.allowed_tools.tools[1].function.name", ['"g"', "not among"]),
        ({"tools": [TOOL], "tool_choice": allowed("auto", 5)},
         "tool_choice.allowed_tools.tools[0]", ["function", "5"]),
        ({"tool_choice": allowed("auto", "get_weather")}, "tool_choice", ["needs tools"]),
        ({"tools": [TOOL, TOOL], "tool_choice": allowed("auto", "get_weather")},
         "tools[1].function.name", ["another tool"]),
        ({"tools": [TOOL, OTHER], "tool_choice": allowed("auto", "get_weather"),
          "response_format": {"type": "json_object"}}, "tool_choice", ["response_format"]),
        ({"reasoning_effort": "high"}, "reasoning_effort", ["takes none of", '"high"']),
        ({"reasoning_effort": "much"}, "reasoning_effort", ["minimal", '"much"']),
        ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages[0].tool_call_id",
         ["tool messages"]),
    ],
)  # fmt: skip
async def test_what_is_refused(
    serve: Serve, body: dict[str, Any], param: str, words: list[str]
) -> None:
    reply = await serve("x").post("/v1/chat/completions", json={"messages": [USER], **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert all(word in error["message"] for word in words), error["message"]


async def test_the_operator_may_forbid_free_choice(serve: Serve) -> None:
    client = serve(CALL, enable_auto_tool_choice=False)
    body = {"messages": [USER], "tools": [TOOL]}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and "--enable-auto-tool-choice" in reply.text
    choice = await chat(client, tools=[TOOL], tool_choice="none")
    assert choice["finish_reason"] == "stop"


async def test_a_parser_can_be_turned_off(serve: Serve) -> None:
    choice = await chat(serve(CALL, tool_call_parser="none"), tools=[TOOL])
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


def test_a_parser_that_does_not_exist() -> None:
    engine, _ = scripted_engine(["x"])
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        ServerState(ServerConfig(tool_call_parser="hermez")).serve(engine)


def test_a_template_that_shows_no_tools() -> None:
    parsers = choose_parsers(ServerConfig(), ["{% for m in messages %}{{ m.content }}{% endfor %}"])
    assert not parsers.kinds and parsers.names == "tool calls: none, reasoning: none"
    use = tool_use([tool_spec("tools[0]", "f")], None)
    with pytest.raises(InvalidRequest, match="does not show tools"):
        parsers.check_tools(use)
    parsers.check_tools(tool_use([], None))


def test_efforts_reach_the_variables_that_a_template_reads() -> None:
    told = choose_parsers(ServerConfig(), ["{{ tools }}{% if enable_thinking %}<think>{% endif %}"])
    assert told.variables("none", None) == {"enable_thinking": False}
    assert told.variables("low", {"x": 1}) == {"enable_thinking": True, "x": 1}
    assert told.variables("low", {"enable_thinking": False}) == {"enable_thinking": False}
    assert told.variables(None, None) == {}
    oss = choose_parsers(ServerConfig(), ["{{ reasoning_effort }}{{ message.thinking }}"])
    assert oss.variables("max", None) == {"reasoning_effort": "max"}


def test_the_neutral_form_is_what_apis_share() -> None:
    use = read_tools([TOOL], "auto", parallel=False)
    assert use.choice == ToolChoice("auto", parallel=False)
    assert use.for_template() == [TOOL]
    flat = tool_spec("tools[0]", "get_weather", None, SCHEMA, schema="input_schema")
    assert flat.for_template() == TOOL
    assert tool_use([flat], ToolChoice("none")).for_template() is None
    with pytest.raises(InvalidRequest, match=r"tools\[0\].input_schema must be"):
        tool_spec("tools[0]", "f", None, 5, schema="input_schema")


def test_special_tokens_that_are_marks_are_shown_to_the_parser() -> None:
    engine, _ = scripted_engine(["x"])
    use = read_tools([TOOL])
    parsers = choose_parsers(ServerConfig(tool_call_parser="hermes"), [])
    known = {"<tool_call>": 3, "<|im_end|>": 2}

    class Tokenizer:
        special_tokens = known

    params = engine.default_params
    parsing, changed = parsers.parsing("", use, params, Tokenizer())  # type: ignore[arg-type]
    assert changed.shown_special_ids == [3]
    _, same = parsers.parsing("", read_tools([]), params, Tokenizer())  # type: ignore[arg-type]
    assert same is params, "nothing is parsed without tools"
    shown = params.replace(skip_special_tokens=False)
    assert ModelParsers().parsing("", use, shown, engine.tokenizer)[1] is shown
    assert parsing.begin(0, "r") is not None
