"""pydantic-ai: an agent with a tool, a typed output, and the same over the Responses API."""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1], sys.argv[2]
provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
settings = {"temperature": 0, "max_tokens": 200}


class Capital(BaseModel):
    """The capital of a country."""

    country: Literal["France", "Italy"]
    capital: Literal["Paris", "Rome"]


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    cities.append(city)
    return "sunny"


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind(MODEL, provider=provider)
    plain = Agent(model, model_settings=settings)
    assert "Paris" in plain.run_sync("What is the capital of France?").output
    cities: list[str] = []
    agent = Agent(model, tools=[get_weather], model_settings=settings)
    assert agent.run_sync("What is the weather in Paris?").output
    assert cities == ["Paris"], cities
    typed = Agent(model, output_type=NativeOutput(Capital), model_settings=settings)
    assert isinstance(typed.run_sync("What is the capital of France?").output, Capital)
    by_tool = Agent(model, output_type=Capital, model_settings=settings)
    assert isinstance(by_tool.run_sync("What is the capital of France?").output, Capital)
    print("ok", kind.__name__, flush=True)
