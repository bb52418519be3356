"""openai-python: chat, streams and their helper, parse, tools, completions, responses, models."""

from __future__ import annotations

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1], sys.argv[2]
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
PERSON = "Write JSON: Anna is 34 years old and lives in Rome."
ASK_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]


class Capital(BaseModel):
    """What `parse` is asked for."""

    country: Literal["France", "Italy"]
    capital: Literal["Paris", "Rome"]


def chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0)
    assert "Paris" in reply.choices[0].message.content
    assert reply.usage.prompt_tokens_details.cached_tokens >= 0
    parts = [{"type": "text", "text": "What is the capital of France?"}]
    listed = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], temperature=0
    )
    assert listed.choices[0].message.content == reply.choices[0].message.content


def chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=CAPITAL,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "Paris" in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0


def stream_helper_with_tools(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    with client.chat.completions.stream(
        model=MODEL, messages=ASK_WEATHER, tools=tools, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds, kinds
    call = final.choices[0].message.tool_calls[0]
    assert final.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def a_call_and_its_result(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    first = client.chat.completions.create(
        model=MODEL, messages=ASK_WEATHER, tools=tools, temperature=0
    )
    message = first.choices[0].message
    result = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": '{"weather": "sunny", "temperature": 21}',
    }
    second = client.chat.completions.create(
        model=MODEL, messages=[*ASK_WEATHER, message, result], tools=tools, temperature=0
    )
    assert second.choices[0].message.content
    forced = client.chat.completions.create(
        model=MODEL,
        messages=ASK_WEATHER,
        tools=tools,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
    )
    assert forced.choices[0].message.tool_calls[0].function.name == "get_weather"


def some_of_the_tools(client: openai.OpenAI) -> None:
    """`allowed_tools` of chat and of Responses: the tool that fits best is not among them."""
    time = {**WEATHER, "name": "get_time", "description": "Get the time in a city."}
    for mode in ("auto", "required"):
        reply = client.chat.completions.create(
            model=MODEL,
            messages=ASK_WEATHER,
            tools=[{"type": "function", "function": tool} for tool in (WEATHER, time)],
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": mode,
                    "tools": [{"type": "function", "function": {"name": "get_time"}}],
                },
            },
            temperature=0,
        )
        calls = reply.choices[0].message.tool_calls or []
        assert all(call.function.name == "get_time" for call in calls), calls
        assert calls or mode == "auto"
        response = client.responses.create(
            model=MODEL,
            input="What is the weather in Paris?",
            tools=[{"type": "function", **tool} for tool in (WEATHER, time)],
            tool_choice={
                "type": "allowed_tools",
                "mode": mode,
                "tools": [{"type": "function", "name": "get_time"}],
            },
            temperature=0,
        )
        calls = [item for item in response.output if item.type == "function_call"]
        assert all(call.name == "get_time" for call in calls), calls
        assert calls or mode == "auto"


def parse(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model=MODEL, messages=CAPITAL, response_format=Capital, temperature=0, max_tokens=100
    )
    assert isinstance(reply.choices[0].message.parsed, Capital)
    json_object = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PERSON}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=100,
    )
    written = json.loads(json_object.choices[0].message.content)
    assert written == {"name": "Anna", "age": 34, "city": "Rome"}, written


def completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL,
        prompt="The capital of France is",
        max_tokens=4,
        temperature=0,
        echo=True,
        logprobs=1,
    )
    assert "Paris" in reply.choices[0].text
    assert reply.choices[0].logprobs.token_logprobs[0] is None


def responses(client: openai.OpenAI) -> None:
    reply = client.responses.create(
        model=MODEL, input="What is the capital of France?", temperature=0
    )
    assert "Paris" in reply.output_text
    assert client.responses.retrieve(reply.id).output_text == reply.output_text
    next_reply = client.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=reply.id, temperature=0
    )
    assert next_reply.output_text
    streamed = list(
        client.responses.create(
            model=MODEL, input="What is the capital of France?", temperature=0, stream=True
        )
    )
    assert streamed[0].type == "response.created"
    assert streamed[-1].type == "response.completed"
    assert streamed[-1].response.output_text == reply.output_text
    with client.responses.stream(
        model=MODEL,
        input="What is the capital of France?",
        text_format=Capital,
        temperature=0,
        max_output_tokens=100,
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Capital)
    called = client.responses.create(
        model=MODEL,
        input="What is the weather in Paris?",
        tools=[{"type": "function", "strict": True, **WEATHER}],
        temperature=0,
    )
    calls = [item for item in called.output if item.type == "function_call"]
    assert json.loads(calls[0].arguments) == {"city": "Paris"}


def models_and_errors(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    try:
        client.models.retrieve("org/other")
    except openai.NotFoundError as error:
        assert error.body["message"]
    else:
        raise AssertionError("an unknown model was found")
    try:
        client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=9)
    except openai.BadRequestError as error:
        assert error.param == "temperature"
    else:
        raise AssertionError("temperature 9 was accepted")


with openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
    for step in (
        chat,
        chat_stream,
        stream_helper_with_tools,
        a_call_and_its_result,
        some_of_the_tools,
        parse,
        completions,
        responses,
        models_and_errors,
    ):
        step(client)
        print("ok", step.__name__, flush=True)
