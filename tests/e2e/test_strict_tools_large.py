"""Calls of strict tools with a vocabulary of the size people use, through the official client.

The model has random weights: only the grammar makes what it says calls that fit their schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from live_server import Server, serving
from loop_clock import large_model

ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9},
                 "maxItems": 3},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}  # fmt: skip
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "pattern": "^[a-z ]{1,20}$"}},
    "required": ["text"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "note": NOTE}
NAMED = {"type": "function", "function": {"name": "note"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
CHOICES: list[tuple[Any, set[str]]] = [
    ("required", {"get_weather", "note"}), (NAMED, {"note"}), (ALLOWED, {"note"}),
]  # fmt: skip
"""What a request chooses, and of which tools its one call may then be."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = large_model(tmp_path_factory.mktemp("large") / "model", 1024)
    flags = ("--model", str(folder), "--load-format", "dummy", "--served-model-name", "large")
    with serving(*flags) as server, connected(server) as made:
        yield made
        assert "Traceback" not in server.log


def connected(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, choice: Any, seed: int, temperature: float) -> Any:
    """The text of a reply, and names and arguments of its calls."""
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name, schema in SCHEMAS.items()
    ]
    asked: Any = {
        "model": "large", "messages": ASK, "tools": tools, "tool_choice": choice, "seed": seed,
        "parallel_tool_calls": False, "temperature": temperature,
        "max_tokens": 40 if choice == "auto" else 300,
    }  # fmt: skip
    if choice == "auto":  # free text without end
        message = client.chat.completions.create(**asked).choices[0].message
    else:
        with client.chat.completions.stream(**asked) as stream:
            message = stream.get_final_completion().choices[0].message
    calls = message.tool_calls or []
    return message.content, [(call.function.name, call.function.arguments) for call in calls]


def check(calls: list[tuple[str, str]], names: set[str]) -> None:
    [(name, arguments)] = calls
    assert name in names
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_chat_alone_and_in_a_crowd(client: openai.OpenAI) -> None:
    asked = [(choice, seed, float(seed % 2)) for choice, _ in CHOICES for seed in range(2)]
    asked += [("auto", 0, 1.0)]
    alone = [chat(client, *one) for one in asked]
    for (choice, names), first in zip(CHOICES, range(0, 6, 2), strict=True):
        for text, calls in alone[first : first + 2]:
            assert not text, choice
            check(calls, names)
    with ThreadPoolExecutor(len(asked)) as threads:
        assert list(threads.map(lambda one: chat(client, *one), asked)) == alone


def test_responses(client: openai.OpenAI) -> None:
    tools: Any = [
        {"type": "function", "name": name, "parameters": schema, "strict": True}
        for name, schema in SCHEMAS.items()
    ]
    reply = client.responses.create(
        model="large", input="Weather?", tools=tools, tool_choice="required",
        parallel_tool_calls=False, temperature=1, max_output_tokens=300,
        extra_body={"seed": 1},
    )  # fmt: skip
    calls = [(item.name, item.arguments) for item in reply.output if item.type == "function_call"]
    check(calls, set(SCHEMAS))
