"""Anthropic's client against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import pydantic
import pytest

from live_server import Server

anthropic = pytest.importorskip("anthropic")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ASK = {
    "model": "quire-demo",
    "max_tokens": 60,
    "messages": QUESTION,
    "extra_body": {"temperature": 0},  # newer clients have no argument for it
}


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ASK)
    assert message.role == "assistant" and message.stop_reason == "end_turn"
    assert "Paris" in message.content[0].text
    assert message._request_id and message.id == f"msg_{message._request_id}"
    again = client.messages.create(**ASK)
    assert again.content == message.content
    assert again.usage.cache_read_input_tokens, "the prompt is cached by now"
    total = again.usage.input_tokens + again.usage.cache_read_input_tokens
    counted = client.messages.count_tokens(model="quire-demo", messages=QUESTION)
    assert counted.input_tokens == total


def test_a_stream_gives_the_same_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text == whole.content[0].text
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens


def test_system_and_prefill(client: anthropic.Anthropic) -> None:
    started = [*QUESTION, {"role": "assistant", "content": "The capital of"}]
    message = client.messages.create(
        **ASK | {"messages": started, "system": "You are quire.", "stop_sequences": ["Paris"]}
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in message.content[0].text


WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ASK_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]


def test_tools(client: anthropic.Anthropic) -> None:
    ask = ASK | {"messages": ASK_WEATHER, "tools": [WEATHER]}
    first = client.messages.create(**ask)
    assert first.stop_reason == "tool_use"
    (use,) = (block for block in first.content if block.type == "tool_use")
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
    with client.messages.stream(**ask) as stream:
        assert stream.get_final_message().content[-1].input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny, 21 degrees"}
    turns = [*ASK_WEATHER, {"role": "assistant", "content": first.content},
             {"role": "user", "content": [result]}]  # fmt: skip
    assert client.messages.create(**ask | {"messages": turns}).content


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_call(choice: dict[str, str], client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ASK, tools=[WEATHER], tool_choice=choice)
    assert message.stop_reason == "tool_use"
    assert all(block.name == "get_weather" for block in message.content)
    assert isinstance(message.content[0].input["city"], str)


class City(pydantic.BaseModel):
    model_config = {"extra": "forbid"}
    name: Annotated[str, pydantic.Field(max_length=12)]
    rank: int


def test_a_message_of_a_form(client: anthropic.Anthropic) -> None:
    message = client.messages.parse(**ASK | {"max_tokens": 80}, output_format=City)
    assert isinstance(message.parsed_output, City)
    form = {"type": "json_schema", "schema": {"type": "objekt"}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema.*objekt"):
        client.messages.create(**ASK, output_config={"format": form})


def test_errors_reach_the_caller_typed(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude") as missing:
        client.messages.create(**ASK | {"model": "claude"})
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="9") as wrong:
        client.messages.create(**ASK | {"extra_body": {"temperature": 9}})
    assert wrong.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="text only"):
        source = {"type": "url", "url": "https://x/y.png"}
        image = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        client.messages.create(**ASK | {"messages": image})
