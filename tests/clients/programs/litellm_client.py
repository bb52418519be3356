"""litellm: its two prefixes for servers like this one."""

from __future__ import annotations

import json
import sys

import litellm

URL, MODEL = sys.argv[1], sys.argv[2]
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"enum": ["Paris", "Rome"]}},
    "required": ["capital"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}

for prefix in ("hosted_vllm", "openai"):
    to = {"model": f"{prefix}/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
    reply = litellm.completion(**to, messages=CAPITAL, temperature=0)
    assert "Paris" in reply.choices[0].message.content
    chunks = list(litellm.completion(**to, messages=CAPITAL, temperature=0, stream=True))
    assert "Paris" in "".join(c.choices[0].delta.content or "" for c in chunks)
    called = litellm.completion(
        **to,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        temperature=0,
    )
    call = called.choices[0].message.tool_calls[0].function
    assert json.loads(call.arguments) == {"city": "Paris"}
    shaped = litellm.completion(
        **to,
        messages=CAPITAL,
        temperature=0,
        max_tokens=100,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "capital", "strict": True, "schema": SCHEMA},
        },
    )
    assert set(json.loads(shaped.choices[0].message.content)) == {"capital"}
    text = litellm.text_completion(
        **{**to, "model": f"text-completion-openai/{MODEL}"},
        prompt="The capital of France is",
        max_tokens=4,
        temperature=0,
    )
    assert "Paris" in text.choices[0].text
    print("ok", prefix, flush=True)
