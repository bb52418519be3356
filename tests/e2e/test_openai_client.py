"""The official client against a real server."""

from __future__ import annotations

import math
from collections.abc import Iterator

import openai
import pytest

from live_server import Server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="quire-demo", messages=QUESTION, temperature=0)
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_stream_says_the_same_as_not_streaming(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="quire-demo", messages=QUESTION, temperature=0)
    stream = client.chat.completions.create(
        model="quire-demo",
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["quire-demo"]
    assert client.models.retrieve("quire-demo").id == "quire-demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="quire-demo", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    for token in logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(t.logprob for t in token.top_logprobs)  # greedy
        assert sum(math.exp(t.logprob) for t in token.top_logprobs) <= 1.0001


def test_completion_echo_with_prompt_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="quire-demo",
        prompt="The capital of France is",
        max_tokens=1,
        temperature=0,
        echo=True,
        logprobs=1,
    )
    assert reply.choices[0].text.startswith("The capital of France is")
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.token_logprobs) == len(logprobs.tokens or [])
    assert all(isinstance(x, float) for x in logprobs.token_logprobs[1:])


def test_errors_reach_the_caller_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="quire-demo", messages=QUESTION, temperature=9)
    assert caught.value.param == "temperature"
    assert "9" in caught.value.message
