"""`/v1/responses`: the order and fields of its events, whole replies, what is kept, and every
refusal."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import httpx
import pytest

import toy_parsers as toys
from fake_engine import FakeEngine
from named_events import events, scripted_server
from quire.config import ServerConfig
from quire.errors import TooManyRequests
from quire.params import StructuredOutputsParams
from quire.serving.app import build_app
from quire.serving.parsers.think_tags import ThinkTags
from quire.serving.server_state import ServerState

BODY: dict[str, Any] = {"input": "hi"}
TOOL = {"type": "function", "name": "map", "parameters": {"type": "object", "properties": {}}}


async def post(client: httpx.AsyncClient, **body: Any) -> Any:
    reply = await client.post("/v1/responses", json=BODY | body)
    assert reply.status_code == 200, reply.text
    return events(reply.text) if body.get("stream") else reply.json()


def folded(streamed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that a client puts together from the deltas of a stream."""
    output: list[dict[str, Any]] = []
    for event in copy.deepcopy(streamed):
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(output)
                output.append(event["item"])
            case "response.content_part.added":
                assert event["content_index"] == len(output[-1]["content"]) == 0
                output[-1]["content"].append(event["part"])
            case "response.output_text.delta":
                output[event["output_index"]]["content"][0]["text"] += event["delta"]
                output[-1]["content"][0]["logprobs"] += event["logprobs"]
            case "response.reasoning_text.delta":
                output[event["output_index"]]["content"][0]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                output[event["output_index"]]["arguments"] += event["delta"]
            case "response.output_item.done":
                output[-1]["status"] = event["item"]["status"]
        if "item_id" in event:
            assert event["item_id"] == output[event["output_index"]]["id"]
    return output


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(inner) for inner in value]
    if isinstance(value, dict):
        changing = ("id", "call_id", "created_at", "completed_at", "seed", "item_id")
        return {k: without_ids(v) for k, v in value.items() if k not in changing}
    return value


async def test_the_golden_sequence_of_text(client: httpx.AsyncClient) -> None:
    streamed = await post(client, stream=True, metadata={"a": "b"}, max_output_tokens=9)
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    response_id = streamed[0]["response"]["id"]
    own = {"item_id": f"msg_{response_id.removeprefix('resp_')}_0", "output_index": 0}
    part = {**own, "content_index": 0}
    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    item = {"id": own["item_id"], "type": "message", "role": "assistant"}
    done = {**item, "status": "completed", "content": [empty | {"text": "Hey"}]}
    base = {
        "id": response_id,
        "object": "response",
        "created_at": streamed[0]["response"]["created_at"],
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "model": "quire-demo",
        "instructions": None,
        "previous_response_id": None,
        "background": False,
        "store": True,
        "max_output_tokens": 9,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "temperature": 0.7,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
        "seed": 1001,
    }
    prompt = len("<user>hi<assistant>")
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 3,
    }
    completed_at = streamed[-1]["response"]["completed_at"]
    assert completed_at >= base["created_at"]
    end = base | {"status": "completed", "completed_at": completed_at, "output": [done]}
    delta = {"type": "response.output_text.delta", **part, "logprobs": []}
    expected = [
        {"type": "response.created", "response": base},
        {"type": "response.in_progress", "response": base},
        {"type": "response.output_item.added", "output_index": 0,
         "item": {**item, "status": "in_progress", "content": []}},
        {"type": "response.content_part.added", **part, "part": empty},
        delta | {"delta": "H"},
        delta | {"delta": "e"},
        delta | {"delta": "y"},
        {"type": "response.output_text.done", **part, "text": "Hey", "logprobs": []},
        {"type": "response.content_part.done", **part, "part": empty | {"text": "Hey"}},
        {"type": "response.output_item.done", "output_index": 0, "item": done},
        {"type": "response.completed", "response": end | {"usage": usage}},
    ]  # fmt: skip
    for number, event in enumerate(expected):
        assert streamed[number] == event | {"sequence_number": number}
    whole = await post(client, metadata={"a": "b"}, max_output_tokens=9)
    assert without_ids(whole) == without_ids(streamed[-1]["response"])


async def test_the_golden_sequence_of_thoughts_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _, _ = scripted_server(monkeypatch, [toys.TEXT], ["thoughts", "toy"])
    async with client:
        streamed = await post(client, stream=True, tools=[TOOL])
        whole = await post(client, tools=[TOOL])
        bare = await post(client, tools=[TOOL], include_reasoning=False)
    kinds: list[str] = []
    for event in streamed:
        kind = event["type"].removeprefix("response.")
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    added, done = "output_item.added", "output_item.done"
    thought = [
        added, "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", done,
    ]  # fmt: skip
    text = [word.replace("reasoning", "output") for word in thought]
    call = [
        added, "function_call_arguments.delta", "function_call_arguments.done", done,
    ]  # fmt: skip
    short = [added, "function_call_arguments.done", done]
    assert kinds == [
        "created", "in_progress", *thought, *text, *call, *text, *short, *call, *text, "completed",
    ]  # fmt: skip
    output = streamed[-1]["response"]["output"]
    assert folded(streamed) == output
    for one in (streamed[-1]["response"], whole):
        # How many tokens come at once differs, and with it to what those at the border count.
        assert 0 < one["usage"]["output_tokens_details"].pop("reasoning_tokens") < 20
    assert without_ids(streamed[-1]["response"]) == without_ids(whole)
    begun = [e["item"] for e in streamed if e["type"] == "response.output_item.added"]
    assert [item["id"].split("_")[0] for item in begun] == [
        "rs", "msg", "fc", "msg", "fc", "fc", "msg",
    ]  # fmt: skip
    assert without_ids(begun[0]) == {
        "type": "reasoning", "status": "in_progress", "summary": [], "content": [],
    }  # fmt: skip
    assert without_ids(begun[2]) == {
        "type": "function_call", "status": "in_progress", "name": "map", "arguments": "",
    }  # fmt: skip
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Größe?"}]
    assert output[2]["arguments"] == '{"city": "Köln [0]"}' and output[2]["status"] == "completed"
    assert without_ids(bare["output"]) == without_ids(whole["output"][1:])


class Tagged(ThinkTags):
    """Reasoning between two tokens of the embedded model."""

    opening, closing = "<tool_call>", "</tool_call>"
    thoughts = (opening, closing)


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_reasoning_are_counted(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(toys.TABLE, "tagged", Tagged)
    said = "<tool_call>Let me see.</tool_call>Yes, it is."
    client, core, _ = scripted_server(monkeypatch, [said], ["tagged"])
    async with client:
        got = await post(client, stream=stream)
    usage = (got[-1]["response"] if stream else got)["usage"]
    expected = core.texts[0].index(4)  # the id of the closing tag
    assert usage["output_tokens_details"]["reasoning_tokens"] == expected


async def test_log_probabilities_are_those_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "(thinking) Great 5"
    client, _, _ = scripted_server(monkeypatch, [said], ["thoughts"])
    async with client:
        asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        streamed = await post(client, stream=True, **asked)
        whole = await post(client, **asked)
        without = await post(client)
    logprobs = whole["output"][1]["content"][0]["logprobs"]
    said = "".join(entry["token"] for entry in logprobs[:-1])
    assert said == " Great 5", "the text's and the end's, none of the thought"
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    assert streamed[-1]["response"]["output"][1]["content"][0]["logprobs"] == logprobs
    assert without["output"][1]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_is_cut_is_incomplete(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _, _ = scripted_server(monkeypatch, ["one two three four"])
    async with client:
        got = await post(client, stream=stream, max_output_tokens=2)
    if stream:
        assert got[-1]["type"] == "response.incomplete"
        got = got[-1]["response"]
    assert got["status"] == "incomplete"
    assert got["incomplete_details"] == {"reason": "max_output_tokens"}
    assert got["output"][0]["status"] == "incomplete" and got["output"][0]["content"][0]["text"]


async def test_a_reply_without_text_has_an_empty_message(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _, _ = scripted_server(monkeypatch, [""])
    async with client:
        whole = await post(client)
        streamed = await post(client, stream=True)
    assert whole["output"][0]["content"][0]["text"] == ""
    assert folded(streamed) == streamed[-1]["response"]["output"]


async def test_a_stream_that_fails_ends_with_response_failed(
    client: httpx.AsyncClient, engine: FakeEngine, state: ServerState
) -> None:
    engine.break_after = 2
    streamed = await post(client, stream=True)
    last = streamed[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["output"][0]["content"][0]["text"] == "He"
    assert "secret" not in json.dumps(streamed)
    reply = await client.post("/v1/responses", json=BODY)
    assert (reply.status_code, list(reply.json())) == (500, ["error"])
    assert len(state.responses) == 0


# ---- the conversation ----------------------------------------------------------------------------


async def test_the_conversation_reaches_the_template(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    seen: list[Any] = []
    render = engine.tokenizer.apply_chat_template

    def spy(turns: Any, **kwargs: Any) -> str:
        seen.append((turns, kwargs))
        return render(turns, **kwargs)

    engine.tokenizer.apply_chat_template = spy  # type: ignore[method-assign]
    call = {"type": "function_call", "call_id": "c1", "name": "map", "arguments": '{"a": 1}'}
    items = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_x", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": None},
        {"type": "message", "role": "assistant", "id": "msg_x", "status": "completed",
         "content": [{"type": "output_text", "text": "let me see", "annotations": []}]},
        call,
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2",
         "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "assistant", "content": "Sun."},
        {"role": "assistant", "content": "And rain."},
        {"role": "user", "content": "well?"},
    ]  # fmt: skip
    body = {
        "input": items,
        "instructions": "be kind",
        "tools": [TOOL | {"description": "d"}],
        "reasoning": {"effort": "low", "summary": "auto"},
        "chat_template_kwargs": {"x": 1},
    }
    await post(client, **body)
    turns, kwargs = seen[0]
    function = {"name": "map", "arguments": {"a": 1}}
    assert turns == [
        {"role": "system", "content": "be kind\n\nshort"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "let me see", "reasoning": "hm",
         "tool_calls": [{"id": "c1", "type": "function", "function": function},
                        {"id": "c2", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
        {"role": "assistant", "content": "Sun."},
        {"role": "assistant", "content": "And rain."},
        {"role": "user", "content": "well?"},
    ]  # fmt: skip
    shown = {"name": "map", "description": "d", "parameters": TOOL["parameters"]}
    assert kwargs["tools"] == [{"type": "function", "function": shown}]
    assert (kwargs["x"], kwargs["reasoning_effort"]) == (1, "low")
    reply = await client.post("/v1/responses/input_tokens", json=body)
    assert reply.json() == {
        "object": "response.input_tokens",
        "input_tokens": len(engine.submitted[0][0]),
    }
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function",
               "name": "map"}]}  # fmt: skip
    await post(client, tools=[TOOL, TOOL | {"name": "other"}], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in seen[-1][1]["tools"]] == ["map"]


async def test_a_form_reaches_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    told = await post(client, text={"format": form})
    assert told["text"]["format"] == form
    await post(client, text={"format": {"type": "json_object"}})
    await post(client, text={"format": {"type": "text"}})
    asked = [params.structured_outputs for _, params, *_ in engine.submitted]
    json_object = StructuredOutputsParams(json_object=True)
    assert asked == [StructuredOutputsParams(json=schema), json_object, None]


async def test_a_conversation_goes_on_from_a_kept_response(monkeypatch: pytest.MonkeyPatch) -> None:
    client, core, _ = scripted_server(monkeypatch, [toys.TEXT, "fine"], ["thoughts", "toy"])
    async with client:
        first = await post(client, tools=[TOOL], instructions="be kind")
        calls = [item["call_id"] for item in first["output"] if "call_id" in item]
        items = [{"type": "function_call_output", "call_id": c, "output": c} for c in calls]
        second = await post(client, input=items, previous_response_id=first["id"])
        third = await post(client, input="bye", previous_response_id=second["id"])
        assert third["previous_response_id"] == second["id"]
        # The same conversation, sent in full.
        user = {"role": "user", "content": "hi"}
        everything = [user, *first["output"], *items, *second["output"], user | {"content": "bye"}]
        await post(client, input=everything)
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        references[0].pop("type")
        await post(client, input=[user, *references, *items, *second["output"],
                                  user | {"content": "bye"}])  # fmt: skip
    prompts = [request.prompt_token_ids for request in core.sent]
    assert prompts[2] == prompts[3] == prompts[4]


# ---- what is kept --------------------------------------------------------------------------------


async def get(client: httpx.AsyncClient, path: str, **how: Any) -> tuple[int, Any]:
    method = how.pop("method", "GET")
    reply = await client.request(method, f"/v1/responses/{path}", **how)
    return reply.status_code, reply.json()


async def test_a_response_is_retrieved_and_deleted(client: httpx.AsyncClient) -> None:
    made = await post(client)
    streamed = (await post(client, stream=True))[-1]["response"]
    for one in (made, streamed):
        assert await get(client, one["id"]) == (200, one)
    name = made["id"]
    assert (await get(client, f"{name}?stream=true"))[1]["error"]["param"] == "stream"
    assert (await get(client, f"{name}?include[]=message.output_text.logprobs"))[0] == 200
    status, told = await get(client, name, method="DELETE")
    assert (status, told) == (200, {"id": name, "object": "response", "deleted": True})
    unknown = await get(client, name)
    assert unknown[0] == 404 and name in unknown[1]["error"]["message"]
    assert (await get(client, name, method="DELETE"))[0] == 404
    unstored = await post(client, store=False)
    assert unstored["store"] is False and (await get(client, unstored["id"]))[0] == 404
    reply = await client.post("/v1/responses", json=BODY | {"previous_response_id": name})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "previous_response_id")


async def test_a_response_belongs_to_the_key_that_made_it(engine: FakeEngine) -> None:
    state = ServerState(ServerConfig(api_key=["mine", "yours"]), engine)
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        mine, yours = ({"authorization": f"Bearer {key}"} for key in ("mine", "yours"))
        client.headers.update(mine)
        made = await post(client)
        name = made["id"]
        client.headers.update(yours)
        unknown = f"resp_{'0' * 32}"
        for path in ("{}", "{}/input_items"):
            told = [await get(client, path.format(one)) for one in (name, unknown)]
            assert told[0][0] == told[1][0] == 404
            message = told[0][1]["error"]["message"].replace(name, unknown)
            assert message == told[1][1]["error"]["message"], "not told apart"
        for method, path in (("DELETE", name), ("POST", f"{name}/cancel")):
            assert (await get(client, path, method=method, json={}))[0] == 404
        for body in (
            {"previous_response_id": name},
            {"input": [{"type": "item_reference", "id": made["output"][0]["id"]}]},
        ):
            reply = await client.post("/v1/responses", json=BODY | body)
            assert reply.status_code == 404
        client.headers.update(mine)
        assert await get(client, name) == (200, made)


async def test_the_items_of_an_input(client: httpx.AsyncClient) -> None:
    items = [{"role": "user", "content": f"{i}"} for i in range(3)]
    name = (await post(client, input=items))["id"]
    status, told = await get(client, f"{name}/input_items")
    assert status == 200 and told["object"] == "list" and told["has_more"] is False
    texts = [item["content"][0]["text"] for item in told["data"]]
    assert texts == ["2", "1", "0"]
    ids = [item["id"] for item in told["data"]]
    assert (told["first_id"], told["last_id"]) == (ids[0], ids[-1])
    _, page = await get(client, f"{name}/input_items?order=asc&limit=1&after={ids[2]}")
    assert [item["id"] for item in page["data"]] == [ids[1]] and page["has_more"] is True
    for query in ("limit=0", "limit=x", "order=up", "after=x", "more=1"):
        status, told = await get(client, f"{name}/input_items?{query}")
        assert status == 400 and told["error"]["param"] == query.split("=")[0]


async def test_a_server_that_keeps_nothing(engine: FakeEngine) -> None:
    state = ServerState(ServerConfig(max_stored_responses=0), engine)
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        made = await post(client)
        assert made["store"] is False and (await get(client, made["id"]))[0] == 404
        reply = await client.post("/v1/responses", json=BODY | {"store": True})
        assert reply.status_code == 400 and "--max-stored-responses" in reply.text


# ---- in the background ---------------------------------------------------------------------------


async def test_a_response_is_made_in_the_background(
    client: httpx.AsyncClient, engine: FakeEngine, state: ServerState
) -> None:
    engine.hang.clear()
    made = await post(client, background=True)
    assert (made["status"], made["output"], made["background"]) == ("queued", [], True)
    await asyncio.sleep(0)
    assert state.answering == 1, "a drain waits for it"
    assert (await get(client, made["id"]))[1]["status"] == "in_progress"
    reply = await client.post("/v1/responses", json=BODY | {"previous_response_id": made["id"]})
    assert reply.status_code == 400 and "not ended" in reply.text
    engine.hang.set()
    while (told := (await get(client, made["id"]))[1])["status"] == "in_progress":
        await asyncio.sleep(0)
    assert told["status"] == "completed" and told["output"][0]["content"][0]["text"] == "Hey"
    assert state.answering == state.in_flight == 0
    # Cancelled too late: it stays as it is.
    assert await get(client, f"{made['id']}/cancel", method="POST", json={}) == (200, told)


async def test_a_background_response_is_cancelled(
    client: httpx.AsyncClient, engine: FakeEngine, state: ServerState
) -> None:
    engine.hang.clear()
    made = await post(client, background=True)
    status, told = await get(client, f"{made['id']}/cancel", method="POST", json={})
    assert (status, told["status"]) == (200, "cancelled")
    assert engine.aborted == [made["id"]] and state.answering == 0
    assert await get(client, made["id"]) == (200, told)
    again = await post(client, background=True)
    assert (await get(client, again["id"], method="DELETE"))[1]["deleted"]
    assert engine.aborted == [made["id"], again["id"]]
    assert (await get(client, again["id"]))[0] == 404
    engine.hang.set()
    whole = await post(client)
    status, told = await get(client, f"{whole['id']}/cancel", method="POST", json={})
    assert status == 400 and "background" in told["error"]["message"]


async def test_what_fails_in_the_background_is_told(
    client: httpx.AsyncClient, engine: FakeEngine, state: ServerState
) -> None:
    engine.break_after = 1
    made = await post(client, background=True)
    while (told := (await get(client, made["id"]))[1])["status"] != "failed":
        await asyncio.sleep(0)
    assert told["error"]["code"] == "server_error" and "secret" not in json.dumps(told)
    engine.refuse = TooManyRequests("full")
    reply = await client.post("/v1/responses", json=BODY | {"background": True})
    assert reply.status_code == 429 and len(state.responses) == 1


# ---- what is wrong -------------------------------------------------------------------------------


def _item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def _part(**fields: Any) -> dict[str, Any]:
    return _item(role="user", content=[fields])


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "got null"),
    ({"input": 5}, "input", "got 5"),
    ({"input": []}, "input", "must not be empty"),
    ({"input": [5]}, "input[0]", "an object"),
    (_item(role="king", content="x"), "input[0].role", '"king"'),
    (_item(role="user"), "input[0].content", "is required"),
    (_item(role="user", content=5), "input[0].content", "got 5"),
    (_item(role="user", content="x", nmae="y"), "input[0].nmae", "Unknown"),
    (_part(type="input_image", image_url="x"), "input[0].content[0].type", "text only"),
    (_part(type="input_file", file_id="x"), "input[0].content[0].type", "text only"),
    (_part(type="output_text", text="x"), "input[0].content[0].type", "output_text"),
    (_part(type="input_text", text=5), "input[0].content[0].text", "got 5"),
    (_item(type="web_search_call", id="x"), "input[0].type", "runs no tools"),
    (_item(type="compaction", encrypted_content="x"), "input[0].type", "can read it"),
    (_item(type="poem"), "input[0].type", '"poem"'),
    (_item(type="function_call", call_id="x", name="f", arguments="{"), "input[0].arguments",
     'JSON object in a string, got "{"'),
    (_item(type="function_call", call_id="x", name="f"), "input[0].arguments", "is required"),
    (_item(type="function_call_output", output="x"), "input[0].call_id", "is required"),
    ({"instructions": 5}, "instructions", "got 5"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
    ({"max_output_tokens": "5"}, "max_output_tokens", 'got "5"'),
    ({"temperature": 9}, "temperature", "got 9"),
    ({"top_logprobs": 21}, "top_logprobs", "21"),
    ({"top_logprobs": -2}, "top_logprobs", "-2"),
    ({"include": ["file_search_call.results"]}, "include", "runs no tools"),
    ({"include": ["everything"]}, "include", "must be one of"),
    ({"metadata": {"a": 5}}, "metadata", "got 5"),
    ({"metadata": {"a": "x" * 513}}, "metadata", "513"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "17"),
    ({"user": "x" * 1025}, "user", "1025"),
    ({"cache_salt": ""}, "cache_salt", "empty"),
    ({"truncation": "auto"}, "truncation", "does not fit"),
    ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
    ({"prompt": {"id": "x"}}, "prompt", "instructions"),
    ({"max_tool_calls": 3}, "max_tool_calls", "runs none"),
    ({"service_tier": "priority"}, "service_tier", "tiers"),
    ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"messages": []}, "messages", "input"),
    ({"request_id": "x"}, "request_id", "X-Request-Id"),
    ({"background": True, "store": False}, "background", "store"),
    ({"stream_options": {}}, "stream_options", "stream"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation", "padded"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "runs no tools"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "runs no tools"),
    ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools[0].function", "Unknown"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "is required"),
    ({"tools": [TOOL | {"parameters": 5}]}, "tools[0].parameters", "got 5"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "another tool"),
    ({"tool_choice": "maybe"}, "tool_choice", '"maybe"'),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "runs no tools"),
    ({"tool_choice": {"type": "function", "name": "x"}, "tools": [TOOL]}, "tool_choice", '"x"'),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto",
                      "tools": [{"type": "function", "name": "x"}]}, "tools": [TOOL]},
     "tool_choice.tools[0].name", '"x"'),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", '"huge"'),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", '"detailed"'),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type", '"yaml"'),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", "is required"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"a": "x" * 300000}}}},
     "text.format.schema", "text.format.schema must be at most"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", '"low"'),
    ({"inptu": "x"}, "inptu", "`input`"),
    ({"priority": 2**63}, "priority", f"got {2**63}"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "words"), WRONG, ids=lambda v: str(v)[:40])
async def test_what_is_wrong_is_named(
    body: dict[str, Any], param: str, words: str, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    reply = await client.post("/v1/responses", json=BODY | body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert words in error["message"], error
    assert error["param"] == param
    assert not engine.submitted
