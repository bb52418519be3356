"""langchain-openai: invoke, stream, tools, structured output, usage."""

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1], sys.argv[2]


class Capital(BaseModel):
    """The capital of a country."""

    country: Literal["France", "Italy"]
    capital: Literal["Paris", "Rome"]


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"sunny in {city}"


chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0, max_retries=0)
reply = chat.invoke("What is the capital of France?")
assert "Paris" in reply.content
assert reply.usage_metadata["input_tokens"] > 0
assert "cache_read" in reply.usage_metadata["input_token_details"]
print("ok invoke", flush=True)

assert "Paris" in "".join(c.content for c in chat.stream("What is the capital of France?"))
print("ok stream", flush=True)

asked = HumanMessage("What is the weather in Paris?")
called = chat.bind_tools([get_weather]).invoke([asked])
assert called.tool_calls[0]["args"] == {"city": "Paris"}
result = ToolMessage(
    get_weather.invoke(called.tool_calls[0]["args"]), tool_call_id=called.tool_calls[0]["id"]
)
assert chat.bind_tools([get_weather]).invoke([asked, called, result]).content
print("ok tools", flush=True)

for method in ("json_schema", "function_calling"):
    shaped = chat.with_structured_output(Capital, method=method)
    assert isinstance(shaped.invoke("What is the capital of France?"), Capital)
print("ok structured output", flush=True)

through_responses = ChatOpenAI(
    model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0, use_responses_api=True
)
assert "Paris" in through_responses.invoke("What is the capital of France?").text
print("ok responses", flush=True)

text = OpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0, max_tokens=4)
assert "Paris" in text.invoke("The capital of France is")
print("ok completions", flush=True)
