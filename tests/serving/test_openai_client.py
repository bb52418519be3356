"""The official client against uvicorn with a fake engine behind it, over a real socket."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import openai
import pytest

from patience import PATIENCE, wait_for
from quire.config import ServerConfig
from threaded_server import Running

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    made = Running(ServerConfig(port=0, api_key=["sesame"]))
    yield made
    made.stop()


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{running.port}/v1"
    with openai.OpenAI(base_url=url, api_key="sesame", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="quire-demo", messages=MESSAGES)  # type: ignore[arg-type]
    assert reply.choices[0].message.content == "Hey"
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 2
    assert reply._request_id and reply.id == f"chatcmpl-{reply._request_id}"


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="quire-demo",
        messages=MESSAGES,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hey"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="quire-demo", messages=MESSAGES) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hey"


def test_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="quire-demo",
        messages=MESSAGES,  # type: ignore[arg-type]
        logprobs=True,
        top_logprobs=2,
    )
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None and [t.token for t in content] == ["H", "e", "y"]
    assert all(len(t.top_logprobs) == 2 for t in content)


def test_completion_echo(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="quire-demo", prompt=[97, 98], echo=True, logprobs=1, max_tokens=1
    )
    logprobs = reply.choices[0].logprobs
    assert reply.choices[0].text == "abH"
    assert logprobs is not None and logprobs.tokens == ["a", "b", "H"]
    assert logprobs.token_logprobs is not None and logprobs.token_logprobs[0] is None


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["quire-demo", "org/small"]
    assert client.models.retrieve("org/small").id == "org/small"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/large")


def test_errors_are_typed(client: openai.OpenAI, running: Running) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="quire-demo", messages=MESSAGES, temperature=9)  # type: ignore[arg-type]
    assert (bad.value.param, bad.value.type) == ("temperature", "BadRequestError")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    running.engine.break_after = 1
    try:
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="quire-demo", messages=MESSAGES)  # type: ignore[arg-type]
        with pytest.raises(openai.APIError, match="failed on this request"):
            list(
                client.chat.completions.create(
                    model="quire-demo",
                    messages=MESSAGES,  # type: ignore[arg-type]
                    stream=True,
                )
            )
    finally:
        running.engine.break_after = None


def test_closing_a_stream_aborts(client: openai.OpenAI, running: Running) -> None:
    running.engine.hang.clear()
    before = len(running.engine.aborted)
    try:
        stream = client.chat.completions.create(
            model="quire-demo",
            messages=MESSAGES,  # type: ignore[arg-type]
            stream=True,
        )
        stream.close()
        wait_for(lambda: len(running.engine.aborted) > before, "an abort")
    finally:
        running.engine.hang.set()


def _raw(running: Running, data: bytes) -> bytes:
    """What the server says until it closes the connection."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE) as made:
        parts = []
        with contextlib.suppress(ConnectionError):
            made.sendall(data)
            while part := made.recv(65536):
                parts.append(part)
        return b"".join(parts)


def test_huge_headers_are_refused(running: Running) -> None:
    reply = _raw(running, b"GET /livez HTTP/1.1\r\nx: " + b"a" * 200_000)
    assert reply.startswith(b"HTTP/1.1 400")


def test_large_bodies_are_not_taken_for_headers(running: Running) -> None:
    body = b'{"prompt": "x", "user": "' + b"a" * 100_000 + b'"}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: sesame\r\nconnection: close\r\n"
        b"content-type: application/json\r\n"
    )
    reply = _raw(running, head + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert reply.startswith(b"HTTP/1.1 400") and b"at most 1024 characters" in reply


def test_a_caller_that_is_still_sending_too_much_sees_why_it_is_refused(running: Running) -> None:
    limit = running.state.config.max_body_bytes
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: sesame\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % (6 * limit)
    )
    reply = _raw(running, head + b" " * (6 * limit))
    assert reply.startswith(b"HTTP/1.1 413") and b"at most %d bytes" % limit in reply


def test_a_caller_that_asks_first_is_refused_before_it_sends(running: Running) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: sesame\r\n"
        b"content-type: application/json\r\ncontent-length: 99999999\r\n"
        b"expect: 100-continue\r\n\r\n"
    )
    assert _raw(running, head).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("target", [b"http://quire/v1/models", b"//livez", b"/livez/../v1/models"])
def test_odd_request_targets_need_a_key(running: Running, target: bytes) -> None:
    reply = _raw(
        running, b"GET " + target + b" HTTP/1.1\r\nhost: livez\r\nconnection: close\r\n\r\n"
    )
    assert reply.startswith(b"HTTP/1.1 401"), reply


def test_a_body_of_many_tiny_chunks(running: Running) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % c for c in b'{"prompt": "abc"}')
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: sesame\r\n"
        b"connection: close\r\ntransfer-encoding: chunked\r\n"
        b"content-type: application/json\r\n\r\n"
    )
    assert _raw(running, head + chunks + b"0\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("before", [b"", b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_headers_that_never_end(
    running: Running, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    """The server hangs up, on a new connection and on one that is kept alive."""
    monkeypatch.setattr("quire.serving.http_server._Protocol._header_seconds", 0.3)
    reply = _raw(running, before + b"GET /livez HTTP/1.1\r\nx: ")
    assert reply.count(b"HTTP/1.1") == (1 if before else 0)
