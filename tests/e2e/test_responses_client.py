"""The official client against `/v1/responses` of a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import openai
import pydantic
import pytest

from live_server import Server

ASK = {"model": "quire-demo", "input": "What is the capital of France?", "temperature": 0}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_response(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASK)
    assert made.status == "completed" and "Paris" in made.output_text
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    counted = client.responses.input_tokens.count(model="quire-demo", input=ASK["input"])
    assert counted.input_tokens == made.usage.input_tokens
    assert client.responses.retrieve(made.id) == made
    items = client.responses.input_items.list(made.id)
    assert [item.content[0].text for item in items.data] == [ASK["input"]]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_stream_gives_the_same_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASK)
    events = list(client.responses.create(**ASK, stream=True))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == whole.output_text
    with client.responses.stream(**ASK) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text
    assert final.usage is not None and whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK)
    second = client.responses.create(
        **ASK | {"input": "And of Spain?"}, previous_response_id=first.id
    )
    written = [{"role": "user", "content": ASK["input"]}, *first.output,
               {"role": "user", "content": "And of Spain?"}]  # fmt: skip
    sent = client.responses.create(**ASK | {"input": written}, store=False)
    assert sent.output_text == second.output_text
    assert sent.usage is not None and second.usage is not None
    assert sent.usage.input_tokens == second.usage.input_tokens


def test_in_the_background(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASK, background=True)
    while made.status in ("queued", "in_progress"):
        made = client.responses.retrieve(made.id)
    assert made.status == "completed" and "Paris" in made.output_text
    long = client.responses.create(**ASK, background=True, extra_body={"ignore_eos": True})
    cancelled = client.responses.cancel(long.id)
    assert cancelled.status in ("cancelled", "incomplete")


WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def test_tools(client: openai.OpenAI) -> None:
    ask = ASK | {"input": "What is the weather in Paris?", "tools": [WEATHER]}
    first = client.responses.create(**ask)
    (call,) = (item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    with client.responses.stream(**ask) as stream:
        final = stream.get_final_response()
    assert final.output[-1].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(**ask | {"input": [result]}, previous_response_id=first.id)
    assert second.status == "completed"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_forced_call(choice: Any, client: openai.OpenAI) -> None:
    made = client.responses.create(**ASK, tools=[WEATHER], tool_choice=choice)
    assert made.output and all(item.type == "function_call" for item in made.output)
    assert made.tool_choice == choice or made.tool_choice.name == choice["name"]


class City(pydantic.BaseModel):
    model_config = {"extra": "forbid"}
    name: Annotated[str, pydantic.Field(max_length=12)]
    rank: int


def test_a_parsed_response(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(**ASK, text_format=City, max_output_tokens=80)
    assert isinstance(parsed.output_parsed, City)
    with client.responses.stream(**ASK, text_format=City, max_output_tokens=80) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    form = {"type": "json_schema", "name": "x", "schema": {"type": "objekt"}}
    with pytest.raises(openai.BadRequestError, match="objekt") as caught:
        client.responses.create(**ASK, text={"format": form})
    assert caught.value.param == "text.format.schema"


def test_errors_reach_the_caller_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASK, tools=[{"type": "web_search"}])
    assert caught.value.param == "tools[0].type"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ASK, previous_response_id="resp_x")
