"""`POST /v1/chat/completions`: replies, streams, and what reaches the engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

import toy_parsers as toys
from fake_engine import FakeEngine
from named_events import scripted_server
from quire.errors import EngineDead
from quire.params import RequestOutputKind, SamplingParams
from quire.serving.server_state import ServerState

USER = {"role": "user", "content": "hi"}


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    reply = await client.post("/v1/chat/completions", json={"messages": [USER], **body})
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


async def events(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    """The stream's events; the last one must be `[DONE]` and is left out."""
    body = {"messages": [USER], "stream": True, **body}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = reply.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def last_params(engine: FakeEngine) -> SamplingParams:
    return engine.submitted[-1][1]


async def test_reply(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    reply = await post(client, model="org/small", user="u", metadata={"a": "b"})
    assert reply.pop("id").startswith("chatcmpl-")
    assert isinstance(reply.pop("created"), int)
    assert reply.pop("system_fingerprint").startswith("fp_")
    prompt = len("<user>hi<assistant>")
    assert reply == {
        "object": "chat.completion",
        "model": "org/small",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hey", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": 3,
            "total_tokens": prompt + 3,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "seed": 1001,
    }
    params = last_params(engine)
    assert params.max_tokens is None
    assert params.temperature == 0.7, "the model's default"
    assert params.output_kind is RequestOutputKind.FINAL_ONLY


HEAD = (
    '{"id":"chatcmpl-r","object":"chat.completion.chunk","created":1700000000,'
    '"model":"quire-demo","system_fingerprint":"FP","choices":['
)
PLAIN_STREAM = [
    HEAD + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
    '"finish_reason":null}],"seed":7}',
    HEAD + '{"index":0,"delta":{"content":"H"},"logprobs":null,"finish_reason":null}]}',
    HEAD + '{"index":0,"delta":{"content":"e"},"logprobs":null,"finish_reason":null}]}',
    HEAD + '{"index":0,"delta":{"content":"y"},"logprobs":null,"finish_reason":null}]}',
    HEAD + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}',
    "[DONE]",
]


async def _transcript(
    client: httpx.AsyncClient, state: ServerState, monkeypatch: pytest.MonkeyPatch, **body: Any
) -> list[str]:
    monkeypatch.setattr("quire.serving.exchange.time.time", lambda: 1_700_000_000.5)
    state.model_for().fingerprint = "FP"
    reply = await client.post(
        "/v1/chat/completions",
        json={"messages": [USER], "stream": True, "seed": 7, **body},
        headers={"x-request-id": "r"},
    )
    assert reply.text.endswith("\n\n")
    lines = reply.text[:-2].split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


async def test_golden_stream(
    client: httpx.AsyncClient, state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await _transcript(client, state, monkeypatch) == PLAIN_STREAM


async def test_golden_stream_with_usage(
    client: httpx.AsyncClient, state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = await _transcript(client, state, monkeypatch, stream_options={"include_usage": True})
    expected = [line[:-1] + ',"usage":null}' for line in PLAIN_STREAM[:-1]]
    expected += [
        HEAD + '],"usage":{"prompt_tokens":19,"completion_tokens":3,"total_tokens":22,'
        '"prompt_tokens_details":{"cached_tokens":2}}}',
        "[DONE]",
    ]
    assert got == expected


def _kind(chunk: dict[str, Any]) -> tuple[str, ...]:
    """What a chunk is: the fields that tell it from others, each part of the chunk with its own."""
    fields = {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert set(chunk) - {"seed"} == fields and chunk["object"] == "chat.completion.chunk"
    if not chunk["choices"]:
        assert set(chunk["usage"]) >= {"prompt_tokens", "completion_tokens", "total_tokens"}
        return ("usage",)
    assert chunk["usage"] is None
    (choice,) = chunk["choices"]
    assert set(choice) - {"stop_reason"} == {"index", "delta", "logprobs", "finish_reason"}
    delta = choice["delta"]
    if calls := delta.get("tool_calls"):
        (call,) = calls
        assert set(delta) == {"tool_calls"}
        return ("call", *sorted(call), *sorted(call["function"]))
    return tuple(delta) or ("finish", choice["finish_reason"])


async def test_the_golden_sequence_of_thoughts_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a kind that follow each other are one: how many there are is up to the tokens."""
    made, _, _ = scripted_server(monkeypatch, [toys.TEXT], ["thoughts", "toy"])
    schema = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": "map", "parameters": schema}}
    async with made:
        chunks = await events(made, tools=[tool], stream_options={"include_usage": True})
        whole = await post(made, tools=[tool])
    kinds: list[tuple[str, ...]] = []
    for chunk in chunks:
        if not kinds or kinds[-1] != _kind(chunk):
            kinds.append(_kind(chunk))
    thought, text = ("reasoning", "reasoning_content"), ("content",)
    begin = ("call", "function", "id", "index", "type", "arguments", "name")
    more = ("call", "function", "index", "arguments")
    assert kinds == [
        ("role", "content"), thought, text, begin, more, text, begin, more, text,
        ("finish", "tool_calls"), ("usage",),
    ]  # fmt: skip
    calls = [c for k in chunks for o in k["choices"] for c in o["delta"].get("tool_calls", ())]
    begun = [call for call in calls if "id" in call]
    assert [call["index"] for call in begun] == [0, 1, 2]
    message = whole["choices"][0]["message"]
    for call in message["tool_calls"]:
        index = message["tool_calls"].index(call)
        told = "".join(c["function"]["arguments"] for c in calls if c["index"] == index)
        assert told == call["function"]["arguments"]
    for name in ("content", "reasoning", "reasoning_content"):
        told = "".join(o["delta"].get(name) or "" for k in chunks for o in k["choices"])
        assert told == message[name]


async def test_continuous_usage(client: httpx.AsyncClient) -> None:
    chunks = await events(client, stream_options={"continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 1, 2, 3, 3]


@pytest.mark.parametrize("extras", [{}, {"logprobs": True, "top_logprobs": 2}])
async def test_stream_equals_whole(client: httpx.AsyncClient, extras: dict[str, Any]) -> None:
    whole = await post(client, n=2, seed=5, **extras)
    chunks = await events(client, n=2, seed=5, stream_options={"include_usage": True}, **extras)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        mine = [c for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        scores = [e for c in mine if c["logprobs"] for e in c["logprobs"]["content"]]
        assert scores == (choice["logprobs"]["content"] if extras else [])


async def test_logprobs(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    reply = await post(client, logprobs=True, top_logprobs=2)
    content = reply["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "H",
        "logprob": -0.1,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.1, "bytes": [72]},
            {"token": "I", "logprob": -3.5, "bytes": [73]},
        ],
    }
    assert last_params(engine).logprobs == 2
    bare = await post(client, logprobs=True)
    assert [e["top_logprobs"] for e in bare["choices"][0]["logprobs"]["content"]] == [[]] * 3
    assert last_params(engine).logprobs == 0
    assert (await post(client, logprobs=False))["choices"][0]["logprobs"] is None
    assert last_params(engine).logprobs is None


async def test_tokens_as_ids(client: httpx.AsyncClient) -> None:
    reply = await post(
        client, logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True
    )
    tokens = [e["token"] for e in reply["choices"][0]["logprobs"]["content"]]
    assert tokens == ["token_id:72", "token_id:101", "token_id:121"]
    assert reply["choices"][0]["token_ids"] == [72, 101, 121]
    assert bytes(reply["prompt_token_ids"]) == b"<user>hi<assistant>"
    chunks = await events(client, return_token_ids=True)
    assert bytes(chunks[0]["prompt_token_ids"]) == b"<user>hi<assistant>"
    ids = [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", [])]
    assert ids == [72, 101, 121]


async def test_prompt_logprobs(client: httpx.AsyncClient) -> None:
    reply = await post(client, prompt_logprobs=1)
    scores = reply["prompt_logprobs"]
    assert scores[0] is None and len(scores) == 19
    assert scores[1]["117"] == {"logprob": -0.1, "rank": 1, "decoded_token": "u"}
    assert (await events(client, prompt_logprobs=1))[0]["prompt_logprobs"] == scores


async def test_all_sampling_fields_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    fields = {
        "n": 2, "stop": ["a", "b"], "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "seed": 3,
        "stop_token_ids": [5], "include_stop_str_in_output": True, "ignore_eos": True,
        "min_tokens": 1, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "prompt_logprobs": 0, "allowed_token_ids": [1, 2], "bad_words": ["x"],
    }  # fmt: skip
    await post(client, **fields, max_tokens=9, logit_bias={"5": -1, "7": 2.5}, cache_salt="s")
    prompt, params, _, priority, salt = engine.submitted[-1]
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == {5: -1.0, 7: 2.5}
    assert (params.max_tokens, priority, salt) == (9, 0, "s")


async def test_null_is_absent(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post(client)
    plain = last_params(engine)
    names = ["model", "n", "stop", "stream", "stream_options", "temperature", "tools", "logprobs",
             "logit_bias", "seed", "max_tokens", "audio", "store", "suffix", "skip_special_tokens",
             "response_format", "cache_salt", "priority", "guided_json"]  # fmt: skip
    await post(client, **dict.fromkeys(names))
    assert last_params(engine) == plain


async def test_neutral_values_of_missing_features(client: httpx.AsyncClient) -> None:
    await post(
        client,
        store=False,
        service_tier="auto",
        modalities=["text"],
        parallel_tool_calls=True,
        use_beam_search=False,
        response_format={"type": "text"},
        best_of=1,
    )


async def test_max_tokens_has_two_names(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    reply = await post(client, max_completion_tokens=2)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert last_params(engine).max_tokens == 2
    await post(client, max_completion_tokens=2, max_tokens=2)


async def test_messages_reach_the_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assistant = {"role": "assistant", "content": None, "refusal": None, "audio": None}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await post(
        client,
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": parts, "name": "bob"},
            {**assistant, "tool_calls": [call], "function_call": None, "annotations": []},
            {"role": "tool", "content": "42", "tool_call_id": "c"},
        ],
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="auto",
        chat_template_kwargs={"thinking": False},
    )
    text = bytes(engine.submitted[-1][0]).decode()
    assert text == (
        "[tools:f][thinking=False]<system>be kind<user>a\nb<assistant><tool>42<assistant>"
    )


async def test_documents_reach_the_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post(client, documents=[{"title": "T", "text": "x"}])
    text = bytes(engine.submitted[-1][0]).decode()
    assert text == "[documents=[{'title': 'T', 'text': 'x'}]]<user>hi<assistant>"


async def test_tool_choice_none_hides_the_tools(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    await post(client, tools=tools, tool_choice="none")
    assert bytes(engine.submitted[-1][0]) == b"<user>hi<assistant>"


async def test_continue_and_echo(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [USER, {"role": "assistant", "content": "Once"}]
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    reply = await post(client, **body)
    assert bytes(engine.submitted[-1][0]) == b"<user>hi<assistant>Once"
    assert reply["choices"][0]["message"]["content"] == "OnceHey"
    chunks = await events(client, **body)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == "OnceHey"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"truncate_prompt_tokens": 4}, b"ant>"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, b"<use"),
        ({"truncate_prompt_tokens": 400}, b"<user>hi<assistant>"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 510}, b"t>"),
    ],
)
async def test_truncation(
    client: httpx.AsyncClient, engine: FakeEngine, extra: dict[str, Any], expected: bytes
) -> None:
    await post(client, **extra)
    assert bytes(engine.submitted[-1][0]) == expected


async def test_special_tokens_only_on_request(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await post(client)
    assert engine.submitted[-1][0][0] == ord("<")
    await post(client, add_special_tokens=True)
    assert engine.submitted[-1][0][0] == 256


async def test_priority_needs_the_policy(client: httpx.AsyncClient, state: ServerState) -> None:
    reply = await client.post("/v1/chat/completions", json={"messages": [USER], "priority": 1})
    assert reply.status_code == 200 and reply.headers["x-ignored-fields"] == "priority"
    state.engine = engine = FakeEngine(policy="priority")
    await post(client, priority=-3)
    assert engine.submitted[-1][3] == -3


async def test_own_request_id(client: httpx.AsyncClient) -> None:
    assert (await post(client, request_id="mine"))["id"] == "chatcmpl-mine"


async def test_same_id_at_the_same_time(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.delay = 0.01
    replies = await asyncio.gather(*(post(client, request_id="same") for _ in range(20)))
    assert {reply["id"] for reply in replies} == {"chatcmpl-same"}
    assert len({request_id for _, _, request_id, _, _ in engine.submitted}) == 20


async def test_failed_request(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.break_after = 1
    reply = await client.post("/v1/chat/completions", json={"messages": [USER]})
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "step_failed"
    assert "secret" not in reply.text


async def test_failure_in_a_stream_is_an_event(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.break_after = 2
    chunks = await events(client)
    assert [c["choices"][0]["delta"].get("content") for c in chunks[:-1]] == ["", "H", "e"]
    assert chunks[-1]["error"]["code"] == "step_failed"
    assert "secret" not in str(chunks)


@pytest.mark.parametrize(
    ("death", "code"),
    [
        (EngineDead("the engine core died"), "engine_dead"),
    ],
)
async def test_engine_death_reaches_both_kinds(
    client: httpx.AsyncClient, engine: FakeEngine, death: Exception, code: str
) -> None:
    engine.break_after, engine.death = 1, death
    assert (await events(client))[-1]["error"]["code"] == code
    reply = await client.post("/v1/chat/completions", json={"messages": [USER]})
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == code
    assert reply.headers["retry-after"] == "1"


async def test_abort_from_inside_ends_the_stream_properly(
    client: httpx.AsyncClient, engine: FakeEngine, state: ServerState
) -> None:
    engine.hang.clear()
    task = asyncio.ensure_future(events(client))
    while not state.active_ids:
        await asyncio.sleep(0)
    assert state.in_flight == 1
    for request_id in tuple(state.active_ids):
        await engine.abort(request_id)
    assert (await task)[-1]["choices"][0]["finish_reason"] == "abort"
    assert (state.in_flight, state.active_ids) == (0, set())
