"""A tool parser is one class: a made-up syntax, read at every cut of the text, streamed and whole.

The toys (`toy_parsers.py`) are all that one writes for a model family; the rest is the server as it
is.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import ServerConfig
from quire.errors import ConfigError
from quire.registry import Registry
from quire.serving.app import build_app
from quire.serving.parsing import OutputParser, ParserSetup, Parsing
from quire.serving.server_state import ServerState
from quire.serving.tools import ToolSpec
from quire.serving.turns import (
    ModelTurn,
    Reasoning,
    Text,
    ToolCall,
    ToolCallBegin,
    ToolCallEnd,
    TurnEvent,
)
from scripted_core import ScriptedCore, scripted_engine
from toy_parsers import PARTS, TABLE, TEXT, USER, ToyThoughts, ToyTools

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SETUP = ParserSetup("a prompt", [ToolSpec("f")])


def read(
    pieces: Sequence[str], kinds: Sequence[type[OutputParser]], setup: ParserSetup = SETUP
) -> list[TurnEvent]:
    """The events of a text that comes in pieces."""
    parser = Parsing(kinds, setup).begin(0, "r")
    assert parser is not None
    batches = [parser.feed(piece) for piece in pieces]
    return [event for batch in [*batches, parser.finish()] for event in batch]


def parts(turn: ModelTurn) -> list[tuple[str, str]]:
    """What a turn says, calls without their ids."""
    told = []
    for part in turn.parts:
        if isinstance(part, ToolCall):
            told.append((part.name, part.arguments))
        else:
            told.append(("text" if isinstance(part, Text) else "reasoning", part.text))
    return told


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text in pieces that end at the places."""
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


BOTH = (ToyThoughts, ToyTools)


def test_the_whole_text() -> None:
    assert parts(ModelTurn(0).add(read([TEXT], BOTH))) == PARTS


def test_every_cut_of_the_text_gives_the_same() -> None:
    whole = ModelTurn(0).add(read([TEXT], BOTH))
    for place in range(len(TEXT)):
        assert ModelTurn(0).add(read(cut(TEXT, [place]), BOTH)) == whole, cut(TEXT, [place])
    assert ModelTurn(0).add(read(list(TEXT), BOTH)) == whole


words = st.sampled_from(["[", "]", "[[", "]]", "|", "(", ")", "f", "{}", "é", "\U0001f98a", " "])


@given(st.lists(words, max_size=20), st.lists(st.integers(0, 40), max_size=8))
def test_any_text_at_any_cuts(said: list[str], places: list[int]) -> None:
    text = "".join(said)
    whole = ModelTurn(0).add(read([text], BOTH))
    events = read(cut(text, places), BOTH)
    assert ModelTurn(0).add(events) == whole
    # Events are well formed: no text is empty, calls are numbered, closed, and do not overlap.
    calls, is_open = 0, False
    for event in events:
        if isinstance(event, Text | Reasoning):
            assert event.text and not is_open
        elif isinstance(event, ToolCallBegin):
            assert (event.call, is_open) == (calls, False)
            calls, is_open = calls + 1, True
        elif isinstance(event, ToolCallEnd):
            assert (event.call, is_open) == (calls - 1, True)
            is_open = False
    assert not is_open


def test_requests_without_tools_are_not_parsed_for_them() -> None:
    bare = ParserSetup("a prompt")
    assert Parsing([ToyTools], bare).begin(0, "r") is None
    assert parts(ModelTurn(0).add(read([TEXT], BOTH, bare)))[1:] == [("text", TEXT[8:])]


# ---- over HTTP -----------------------------------------------------------------------------------

Serve = Callable[..., tuple[httpx.AsyncClient, ScriptedCore, ServerState]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """A server whose model says the given texts, and whose parsers are the named ones."""
    monkeypatch.setattr("quire.serving.server_state.PARSERS", Registry("output parser", TABLE))

    def make(
        texts: Sequence[str], parsers: Sequence[str] = ("thoughts", "toy"), seed: int = 0
    ) -> Any:
        engine, core = scripted_engine(texts, seed)
        state = ServerState(ServerConfig())
        state.serve(engine, parsers)
        transport = httpx.ASGITransport(build_app(state))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost"), core, state

    return make


async def whole(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


async def chunks(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Any]:
    reply = await client.post("/v1/chat/completions", json=body | {"stream": True})
    frames = reply.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""], reply.text[-300:]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def joined(streamed: list[Any]) -> dict[int, dict[str, Any]]:
    """The choices of all chunks put together, in the shape of whole ones."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in streamed for choice in chunk["choices"]):
        first = {"message": {"content": ""}, "logprobs": None, "token_ids": []}
        made = found.setdefault(choice["index"], {"index": choice["index"], **first})
        delta, message = choice["delta"], made["message"]
        assert made.get("finish_reason") is None, "something after the end"
        for name in ("content", "reasoning", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                calls.append({k: v for k, v in call.items() if k != "index"})
            else:
                assert call["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        if choice["logprobs"] is not None:
            made["logprobs"] = made["logprobs"] or {"content": [], "refusal": None}
            made["logprobs"]["content"] += choice["logprobs"]["content"]
        made["token_ids"] += choice.get("token_ids", [])
        for name in ("finish_reason", "stop_reason"):
            if choice.get(name) is not None:
                made[name] = choice[name]
    return found


def comparable(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice without what is the same by definition, or is said in another way in a stream."""
    message = {k: v for k, v in choice["message"].items() if k not in ("role", "refusal")}
    message["content"] = message["content"] or ""
    tokens = choice.get("token_ids", [])
    return {"stop_reason": None, **choice, "message": message, "token_ids": tokens}


ALPHABET = [
    "[",
    "[[",
    "]]",
    "|",
    "(",
    ")",
    "f",
    '{"é": 1}',
    "東京",
    "\U0001f98a\u200d",
    " the",
    "\n",
]


def random_case(rng: random.Random) -> tuple[list[str], dict[str, Any]]:
    """Texts for the choices, and a body."""
    texts = []
    for _ in range(3):
        call = f'[[{rng.choice(["f", "größe"])}|{{"x": "{rng.choice(ALPHABET)}"}}]]'
        some = [rng.choice([*ALPHABET, call]) for _ in range(rng.randint(1, 12))]
        texts.append("(" * rng.randint(0, 1) + "".join(some))
    body: dict[str, Any] = {"messages": [USER], "tools": [TOOL], "n": rng.randint(1, 3)}
    body |= {"request_id": "same", "seed": 7, "temperature": 1, "max_tokens": rng.choice([9, 99])}
    if rng.random() < 0.3:
        del body["tools"]
    if rng.random() < 0.3:
        body["stop"] = rng.sample(["]]", "|", "東", "é", "f"], 2)
    if rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": 2}
    if rng.random() < 0.3:
        body |= {"return_token_ids": True, "prompt_logprobs": 1}
    if rng.random() < 0.3:
        body["messages"] = [USER, {"role": "assistant", "content": "Once"}]
        body |= {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    return texts, body


@pytest.mark.parametrize("seed", range(60))
async def test_streams_join_to_the_whole_reply(serve: Serve, seed: int) -> None:
    rng = random.Random(seed)
    texts, body = random_case(rng)
    client, core, _ = serve(texts, rng.choice([("toy",), ("thoughts", "toy"), ()]), seed)
    reply = await whole(client, body)
    core.sent.clear()
    usage = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.5}
    streamed = await chunks(client, body | {"stream_options": usage})
    assert streamed[-1]["usage"] == reply["usage"]
    for name in ("seed", "prompt_logprobs", "prompt_token_ids"):
        assert streamed[0].get(name) == reply.get(name), name
    found = joined(streamed)
    assert sorted(found) == list(range(body["n"]))
    for choice in reply["choices"]:
        assert comparable(found[choice["index"]]) == comparable(choice), (texts, body)
        assert (choice["logprobs"] is not None) == ("logprobs" in body)
    await client.aclose()


async def test_chat_renders_calls(serve: Serve) -> None:
    client, core, _ = serve([TEXT])
    body = {"messages": [USER], "tools": [TOOL], "request_id": "r"}
    choice = (await whole(client, body))["choices"][0]
    message = choice["message"]
    assert (message["reasoning"], message["reasoning_content"]) == ("Größe?", "Größe?")
    assert message["content"] == " So [x] it is.  and  [[half"
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
    assert calls == [part for part in PARTS if part[0] in ("map", "now")]
    assert len({call["id"] for call in message["tool_calls"]}) == 3
    assert choice["finish_reason"] == "tool_calls"
    again = (await whole(client, body))["choices"][0]["message"]
    assert again == message, "the same request has the same ids of calls"
    body["max_tokens"] = len(core.texts[0]) - 12
    choice = (await whole(client, body))["choices"][0]
    assert choice["finish_reason"] == "length", "the cut is told, not the calls before it"
    await client.aclose()


async def test_a_call_alone_has_no_content(serve: Serve) -> None:
    client, _, _ = serve(["[[f|{}]]"])
    message = (await whole(client, {"messages": [USER], "tools": [TOOL]}))["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1
    assert "reasoning" not in message
    await client.aclose()


async def test_the_official_client_takes_them(serve: Serve) -> None:
    http, core, _ = serve([TEXT])
    client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=http)
    asked: Any = {"model": "quire-demo", "messages": [USER], "tools": [TOOL]}
    reply = await client.chat.completions.create(**asked)
    calls = reply.choices[0].message.tool_calls
    assert calls is not None and [call.function.name for call in calls] == ["map", "now", "map"]  # type: ignore[union-attr]
    async with client.chat.completions.stream(**asked) as stream:
        final = await stream.get_final_completion()
    streamed = final.choices[0].message.tool_calls
    assert streamed is not None and final.choices[0].finish_reason == "tool_calls"
    for one, other in zip(streamed, calls, strict=True):
        assert (one.function.name, one.function.arguments) == (
            other.function.name,  # type: ignore[union-attr]
            other.function.arguments,  # type: ignore[union-attr]
        )
    assert final.choices[0].message.content == reply.choices[0].message.content
    # What it got, it can send back.
    back = [USER, reply.choices[0].message.model_dump(exclude_none=True)]
    back += [{"role": "tool", "content": "ok", "tool_call_id": call.id} for call in calls]
    core.texts = core.texts * 2
    await client.chat.completions.create(**asked | {"messages": back[:-1]})
    await client.close()


async def test_completions_are_not_parsed(serve: Serve) -> None:
    client, _, _ = serve([TEXT])
    reply = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 999})
    assert reply.json()["choices"][0]["text"] == TEXT
    await client.aclose()


def test_an_unknown_parser_is_refused_when_the_model_is_served(serve: Serve) -> None:
    with pytest.raises(ConfigError, match="did you mean 'toy'"):
        serve(["x"], ["toi"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_parser_that_fails_ends_its_request_alone(
    serve: Serve, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client, core, state = serve(["good as gold"], ["clumsy"])
    core.texts.append(state.engine_for().tokenizer.encode("well § done, and more", False))
    body = {"messages": [USER], "stream": stream}
    core.first_may_end.clear()
    good = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
    while not core.sent:
        await asyncio.sleep(0)
    bad = await client.post("/v1/chat/completions", json=body)
    assert "secret" not in bad.text
    assert "a secret of the parser" in caplog.text, "the log has the cause"
    if stream:
        events = [json.loads(f.removeprefix("data: ")) for f in bad.text.split("\n\n")[:-2]]
        assert events[-1]["error"]["code"] == "internal_error"
        assert bad.text.endswith("data: [DONE]\n\n")
        assert core.aborted == [core.sent[1].request_id], "what it had asked for is ended"
    else:
        assert (bad.status_code, bad.json()["error"]["code"]) == (500, "internal_error")
    core.first_may_end.set()
    reply = await good
    assert reply.status_code == 200 and "error" not in reply.text
    assert (state.in_flight, state.active_ids) == (0, set())
    await client.aclose()
