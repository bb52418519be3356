"""anthropic: messages whole and streamed, tools and their results, parse, counts, errors."""

from __future__ import annotations

import sys
from typing import Literal

import anthropic
from pydantic import BaseModel

URL, MODEL = sys.argv[1], sys.argv[2]
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
ASK_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


# The SDK has no argument for the temperature any more, but the API has the field.
GREEDY = {"temperature": 0}


class Capital(BaseModel):
    """What `parse` is asked for."""

    country: Literal["France", "Italy"]
    capital: Literal["Paris", "Rome"]


def message(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(model=MODEL, max_tokens=50, extra_body=GREEDY, messages=CAPITAL)
    assert "Paris" in reply.content[0].text
    assert reply.stop_reason == "end_turn"
    assert reply.usage.input_tokens > 0 and reply.usage.output_tokens > 0


def stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=50, extra_body=GREEDY, messages=CAPITAL
    ) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert "Paris" in text
    assert final.content[0].text == text


def tools(client: anthropic.Anthropic) -> None:
    first = client.messages.create(
        model=MODEL, max_tokens=100, extra_body=GREEDY, messages=ASK_WEATHER, tools=[WEATHER]
    )
    assert first.stop_reason == "tool_use"
    use = next(block for block in first.content if block.type == "tool_use")
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny, 21 degrees"}
    second = client.messages.create(
        model=MODEL,
        max_tokens=100,
        extra_body=GREEDY,
        messages=[
            *ASK_WEATHER,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ],
        tools=[WEATHER],
    )
    assert second.content
    with client.messages.stream(
        model=MODEL, max_tokens=100, extra_body=GREEDY, messages=ASK_WEATHER, tools=[WEATHER]
    ) as events:
        streamed = events.get_final_message()
    assert streamed.content[-1].input == {"city": "Paris"}


def parse(client: anthropic.Anthropic) -> None:
    reply = client.messages.parse(
        model=MODEL, max_tokens=100, extra_body=GREEDY, messages=CAPITAL, output_format=Capital
    )
    assert isinstance(reply.parsed_output, Capital)


def count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=CAPITAL)
    reply = client.messages.create(model=MODEL, max_tokens=1, messages=CAPITAL)
    cached = reply.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == reply.usage.input_tokens + cached


def errors(client: anthropic.Anthropic) -> None:
    try:
        client.messages.create(model="other", max_tokens=1, messages=CAPITAL)
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("an unknown model was found")


with anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0) as client:
    for step in (message, stream, tools, parse, count_tokens, errors):
        step(client)
        print("ok", step.__name__, flush=True)
