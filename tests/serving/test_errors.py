"""One row per way to be wrong: status, code, param, and what the message must say."""

from __future__ import annotations

import gzip
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_engine import FakeEngine
from quire.config import ServerConfig
from quire.errors import TooManyRequests
from quire.serving.app import build_app
from quire.serving.openai.schema import (
    CHAT_UNSUPPORTED,
    COMPLETION_UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
)
from quire.serving.server_state import ServerState

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:..."}}


def tool_call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


CHAT_ERRORS = [
    # what is changed in a good body, param, words of the message
    ({"messages": None}, "messages", ["an array", "null"]),
    ({"messages": []}, "messages", ["empty"]),
    ({"messages": "hi"}, "messages", ["an array", '"hi"']),
    ({"messages": [{"content": "x"}]}, "messages[0].role", ["required"]),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", ["user", '"robot"']),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content", ["required"]),
    ({"messages": [{**USER, "contnt": 1}]}, "messages[0].contnt", ["Did you mean `content`"]),
    ({"messages": [{**USER, "content": 5}]}, "messages[0].content", ["a string or an array", "5"]),
    ({"messages": [{**USER, "content": [IMAGE]}]}, "messages[0].content[0].type", ["only", "text"]),
    ({"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages[0].content[0].text", []),
    ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls", ["assistant"]),
    ({"messages": [{**USER, "audio": {"id": "x"}}]}, "messages[0].audio", ["not supported"]),
    ({"messages": [tool_call("{")]}, "messages[0].tool_calls[0].function.arguments",
     ["JSON", 'got "{"']),
    ({"messages": [tool_call("[1]")]}, "messages[0].tool_calls[0].function.arguments",
     ["object", 'got "[1]"']),
    ({"messages": [{**USER, "content": "refuse me"}]}, "messages", ["template refuses"]),
    ({"model": 5}, "model", ["a string", "5"]),
    ({"temperature": "hot"}, "temperature", ["a number", '"hot"']),
    ({"temperature": True}, "temperature", ["a number", "true"]),
    ({"temperature": 2.5}, "temperature", ["[0, 2]", "2.5"]),
    ({"top_p": 0}, "top_p", ["(0, 1]", "0"]),
    ({"top_k": 1.5}, "top_k", ["an integer", "1.5"]),
    ({"n": True}, "n", ["an integer", "true"]),
    ({"n": "1"}, "n", ["an integer", '"1"']),
    ({"n": 1.0}, "n", ["an integer", "1.0"]),
    ({"n": 0}, "n", ["at least 1", "0"]),
    ({"n": 16385}, "n", ["at most 16384 (QUIRE_MAX_N_SEQUENCES)", "16385"]),
    ({"n": 1025}, "n", ["at most 1024", "--max-n-sequences", "1025"]),
    ({"n": 10**30}, "n", ["at most 2147483647"]),
    ({"n": 2, "temperature": 0}, "n", ["greedy", "2"]),
    ({"seed": 2**63}, "seed", [str(2**63 - 1), str(2**63)]),
    ({"stream": 1}, "stream", ["true or false", "1"]),
    ({"stop": [""]}, "stop", ["non-empty"]),
    ({"stop": ["x"] * 65}, "stop", ["64", "65"]),
    ({"stop": [1]}, "stop[0]", ["a string", "1"]),
    ({"max_tokens": 0}, "max_tokens", ["1", "0"]),
    ({"max_completion_tokens": 0}, "max_completion_tokens", ["at least 1", "0"]),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", ["(1)", "(2)"]),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", ["max_tokens (4)", "5"]),
    ({"logit_bias": {"7": 1, "a": 1}}, "logit_bias", ["keyed by integers", 'got "a"']),
    ({"logit_bias": {"7": 1, "01": 1}}, "logit_bias", ["keyed by integers", 'got "01"']),
    ({"logit_bias": {"1": "x"}}, "logit_bias", ["a number"]),
    ({"logit_bias": {"1": 101}}, "logit_bias", ["[-100, 100]", "101"]),
    ({"logit_bias": {"-1": 1}}, "logit_bias", ["at least 0", "-1"]),
    ({"logprobs": 3}, "logprobs", ["true or false", "3"]),
    ({"top_logprobs": 3}, "top_logprobs", ["needs logprobs"]),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", ["at least 0", "-2"]),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["20", "21"]),
    ({"stream_options": {}}, "stream_options", ["needs stream"]),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage",
     ["include_usage"]),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage",
     ["true or false", "1"]),
    ({"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation", ["not supported"]),
    ({"response_format": {"type": "xml"}}, "response_format", ["json_object", '"xml"']),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ["name"]),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", ['"schema"']),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_json", ["both"]),
    ({"structured_outputs": {}}, "structured_outputs", ["exactly one"]),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", ["'regexp'", "regex"]),
    ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, "guided_decoding_backend",
     ["guidance"]),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", ["guided_json"]),
    ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice", ["required", '"some"']),
    ({"tool_choice": "auto"}, "tool_choice", ["needs tools"]),
    ({"tools": [{"type": "x"}]}, "tools[0]", ["function"]),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name",
     ["string", "got null"]),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
     "tools[0].function.strict", ["true or false", "1"]),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message",
     ["exclude"]),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", ["messages"]),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", ["self"]),
    ({"cache_salt": ""}, "cache_salt", ["empty"]),
    ({"cache_salt": "x" * 1025}, "cache_salt", ["1024", "1025"]),
    ({"user": "x" * 1025}, "user", ["1024", "1025"]),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", ["16", "17"]),
    ({"request_id": "a b"}, "request_id", ["visible ASCII", '"a b"']),
    ({"request_id": "a\u0000"}, "request_id", ["visible ASCII"]),
    ({"priority": 2**64}, "priority", [str(2**63 - 1), str(2**64)]),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ["at least 1", "0"]),
    ({"truncation_side": "up"}, "truncation_side", ["left", '"up"']),
    ({"temprature": 1}, "temprature", ["Unknown", "Did you mean `temperature`"]),
    ({"xyzzy": 1}, "xyzzy", ["Unknown field `xyzzy`."]),
    ({"store": True}, "store", ["must be false, got true", "nothing is stored"]),
    ({"store": 0}, "store", ["must be true or false, got 0"]),
    ({"functions": []}, "functions", ["use tools"]),
]  # fmt: skip

TEXT_ERRORS = [
    ({"prompt": None}, "prompt", ["a string or an array", "null"]),
    ({"prompt": ...}, "prompt", ["required"]),
    ({"prompt": []}, "prompt", ["empty"]),
    ({"prompt": [1, "a"]}, "prompt", ["mixed"]),
    ({"prompt": [1, [2]]}, "prompt", ["mixed"]),
    ({"prompt": [True]}, "prompt[0]", ["true"]),
    ({"prompt": [[1, "a"]]}, "prompt[0][1]", ["an integer", '"a"']),
    ({"prompt": [[]]}, "prompt", ["empty"]),
    ({"prompt": [300]}, "prompt", ["0 to 299", "300"]),
    ({"prompt": [-1]}, "prompt", ["0 to 299", "-1"]),
    ({"prompt": [2**70]}, "prompt", ["0 to 299"]),
    ({"prompt": ["x"] * 1025}, "prompt", ["1024", "1025"]),
    ({"prompt": ["x"] * 100, "n": 11}, "prompt", ["1024", "1100"]),
    ({"prompt": "x" * 600}, None, ["511", "601"]),
    ({"prompt": "x" * 5000}, "prompt", ["5000", "2048", "512"]),
    ({"suffix": "x"}, "suffix", ["not supported"]),
    ({"best_of": 2}, "best_of", ["2"]),
    ({"logprobs": True}, "logprobs", ["an integer", "true"]),
    ({"logprobs": 21}, "logprobs", ["20", "21"]),
    ({"max_tokens": 0}, "max_tokens", ["1", "0"]),
    ({"max_completion_tokens": 5}, "max_completion_tokens", ["max_tokens"]),
    ({"top_logprobs": 1}, "top_logprobs", ["Unknown", "logprobs"]),
    ({"messages": [USER]}, "messages", ["/v1/chat/completions"]),
]  # fmt: skip


async def check(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str | None, words: list[str]
) -> None:
    for stream in (False, True) if "stream" not in body else (body["stream"],):
        sent = {k: v for k, v in {**body, "stream": stream}.items() if v is not ...}
        reply = await client.post(path, json=sent)
        error = reply.json()["error"]
        assert reply.status_code == 400, error
        assert error["param"] == param, error
        assert error["type"] == "BadRequestError"
        assert reply.headers["x-should-retry"] == "false"
        for word in words:
            assert word in error["message"], error["message"]


@pytest.mark.parametrize(("change", "param", "words"), CHAT_ERRORS, ids=str)
async def test_bad_chat(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    change: dict[str, Any],
    param: str,
    words: list[str],
) -> None:
    if "stream_options" in change:
        change = {"stream": "stream" in change, **change}
    await check(client, CHAT, {"messages": [USER], **change}, param, words)
    assert engine.submitted == []


@pytest.mark.parametrize(("change", "param", "words"), TEXT_ERRORS, ids=str)
async def test_bad_completion(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    change: dict[str, Any],
    param: str | None,
    words: list[str],
) -> None:
    await check(client, TEXT, {"prompt": "hi", **change}, param, words)
    assert engine.submitted == []


def test_no_field_is_both_supported_and_not() -> None:
    assert not set(ChatRequest.__struct_fields__) & set(CHAT_UNSUPPORTED)
    assert not set(CompletionRequest.__struct_fields__) & set(COMPLETION_UNSUPPORTED)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "ends too early"),
        (b'{"messages": [', "ends too early"),
        (b'{"messages": ]}', "byte 13"),
        (b"{} {}", "trailing characters (byte 4)"),
        (b'{"model": NaN}', "byte 10"),
        (b'{"model": "\xff"}', "not UTF-8"),
        (b'{"model": "\\ud800x"}', "within a character"),
        (b"[]", "must be a JSON object, got []"),
        (b"null", "must be a JSON object, got null"),
        (b"[" * 100_000, "64 levels"),
        (b'{"messages": [], "tools": [' + b'{"a":' * 70 + b"1" + b"}" * 70 + b"]}", "64 levels"),
        (b'{"messages": [], "tools": [' + b'{"a":' * 9999 + b"1", "64 levels"),
        (b'{"messages": [], "metadata": {"a": [' + b"[]," * 100_001 + b"1]}}", "100000"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_bad_json(client: httpx.AsyncClient, body: bytes, words: str) -> None:
    reply = await client.post(CHAT, content=body, headers=JSON)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


SAFELISTED = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
"""What a web page may send to another server without asking it first."""


@pytest.mark.parametrize("given", [*SAFELISTED, "", "application/jsonx", "text/json", "x" * 300])
async def test_a_body_that_is_not_declared_as_json(client: httpx.AsyncClient, given: str) -> None:
    headers = {"content-type": given} if given else {}
    for path in (TEXT, CHAT, "/tokenize", "/limits", "/explain_prefix", "/v1/embeddings"):
        reply = await client.post(path, content=b'{"prompt": "x"}', headers=headers)
        assert reply.status_code == 415
        message = reply.json()["error"]["message"]
        assert "`Content-Type: application/json`" in message and len(message) < 200
        assert (given[:100] or "got none") in message


@pytest.mark.parametrize(
    "given", ["application/json", "Application/JSON", "application/json; charset=utf-8"]
)
async def test_a_body_that_is(client: httpx.AsyncClient, given: str) -> None:
    reply = await client.post(TEXT, content=b'{"prompt": "x"}', headers={"content-type": given})
    assert reply.status_code == 200


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "gzip, identity", "x" * 300])
async def test_a_compressed_body_is_refused_by_its_coding(
    client: httpx.AsyncClient, coding: str
) -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    reply = await client.post(TEXT, content=body, headers=JSON | {"content-encoding": coding})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (415, "Content-Encoding")
    assert coding[:100] in error["message"] and len(error["message"]) < 200


@pytest.mark.parametrize("coding", ["identity", "Identity ", ""])
async def test_a_body_that_is_declared_as_it_is(client: httpx.AsyncClient, coding: str) -> None:
    headers = JSON | {"content-encoding": coding}
    reply = await client.post(TEXT, content=b'{"prompt": "x"}', headers=headers)
    assert reply.status_code == 200


@pytest.mark.parametrize("extra", [{}, {"X-Resumable": "true"}])
async def test_a_byte_order_mark_before_the_body_is_left_out(
    client: httpx.AsyncClient, extra: dict[str, str]
) -> None:
    for path in (TEXT, "/invocations", "/tokenize"):
        body = b'\xef\xbb\xbf{"prompt": "x"}'
        reply = await client.post(path, content=body, headers=JSON | extra)
        assert reply.status_code == 200, reply.text
    body = b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "x"}'
    assert (await client.post(TEXT, content=body, headers=JSON)).status_code == 400


@pytest.mark.parametrize("coding", ["utf-16-le", "utf-16-be"])
async def test_a_body_of_utf16_is_called_so(client: httpx.AsyncClient, coding: str) -> None:
    body = '\ufeff{"prompt": "x"}'.encode(coding)
    reply = await client.post(TEXT, content=body, headers=JSON)
    assert reply.status_code == 400 and "UTF-16" in reply.json()["error"]["message"]


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    for path, body in ((CHAT, {"messages": [USER]}), (TEXT, {"prompt": "x"})):
        reply = await client.post(path, json={**body, "model": "gpt-9"})
        error = reply.json()["error"]
        assert reply.status_code == 404
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "gpt-9" in error["message"] and "quire-demo" in error["message"]


async def test_context_length(client: httpx.AsyncClient) -> None:
    reply = await client.post(TEXT, json={"prompt": "x" * 600})
    assert reply.json()["error"]["code"] == "context_length_exceeded"


async def test_queue_full(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.refuse = TooManyRequests("The queue holds 4 requests; the limit is 4.", retry_after=2.5)
    reply = await client.post(TEXT, json={"prompt": "x", "stream": True})
    assert reply.status_code == 429
    assert reply.json()["error"]["code"] == "queue_full"
    assert reply.headers["retry-after"] == "3"
    assert reply.headers["retry-after-ms"] == "2500"
    assert "x-should-retry" not in reply.headers


ASKING = {
    TEXT: {"prompt": "x"},
    CHAT: {"messages": [USER]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [USER], "max_tokens": 3},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
    "/v1/embeddings": {"input": "x"},
    "/classify": {"input": "x"},
    "/score": {"text_1": "x", "text_2": "y"},
    "/rerank": {"query": "x", "documents": ["y"]},
}
COMPUTES_NOTHING = {
    f"{TEXT}/render": {"prompt": "x"},
    f"{CHAT}/render": {"messages": [USER]},
    "/v1/messages/render": {"messages": [USER], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/responses/input_tokens": {"input": "x"},
    "/tokenize": {"prompt": "x"},
}


async def test_a_full_queue_refuses_before_anything_is_tokenised(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.is_full = True
    tokenizer, engine.tokenizer = engine.tokenizer, None  # type: ignore[assignment]
    for path, body in ASKING.items():
        reply = await client.post(path, json=body)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "3"), path
    engine.tokenizer = tokenizer
    for path, body in COMPUTES_NOTHING.items():
        assert (await client.post(path, json=body)).status_code == 200, path


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += self.format(record) + "\n"


@pytest.fixture
def log() -> Any:
    handler, logger = _Records(), logging.getLogger("quire")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


async def test_unexpected_errors_stay_inside(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, log: _Records
) -> None:
    def explode(*_: Any, **__: Any) -> None:
        raise RuntimeError("object at 0x7f00 in /srv/secret")

    monkeypatch.setattr(engine.tokenizer, "encode", explode)
    reply = await client.post(TEXT, json={"prompt": "x"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (500, "internal_error")
    assert "0x7f00" not in reply.text and "secret" not in reply.text
    error_id = error["message"].split()[-1].rstrip(".")
    assert error_id in log.text and "0x7f00" in log.text


async def test_unexpected_errors_in_a_stream_stay_inside(
    client: httpx.AsyncClient, engine: FakeEngine, log: _Records
) -> None:
    engine.break_after, engine.death = 1, RuntimeError("object at 0x7f00")
    reply = await client.post(CHAT, json={"messages": [USER], "stream": True})
    assert reply.text.endswith("data: [DONE]\n\n")
    assert '"code":"internal_error"' in reply.text and "0x7f00" not in reply.text
    assert "0x7f00" in log.text


@pytest.fixture
async def small(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(
        build_app(ServerState(ServerConfig(max_body_bytes=1024), engine))
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as made:
        yield made


async def test_body_over_the_limit(small: httpx.AsyncClient) -> None:
    reply = await small.post(TEXT, content=b"x" * 1025, headers=JSON)
    assert reply.status_code == 413
    assert reply.json()["error"]["type"] == "PayloadTooLarge"
    assert "1024" in reply.json()["error"]["message"] and "1025" in reply.json()["error"]["message"]
    assert reply.headers["connection"] == "close"
    fits = await small.post(TEXT, content=b"x" * 1024, headers=JSON)
    assert fits.status_code == 400, "only malformed"


async def test_body_over_the_limit_is_noticed_while_it_arrives(small: httpx.AsyncClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 256
            yield b"x" * 256

    reply = await small.post(TEXT, content=endless(), headers=JSON)
    assert reply.status_code == 413
    assert sent <= 9 * 1024 + 512, "some is thrown away, so that the caller sees the reply"


# ---- fuzz -------------------------------------------------------------------------------------

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 400),
    st.sampled_from([2**31, 2**63, -(2**63), 10**40, 0.5, -1.5, 1e300]),
    st.text(max_size=6),
)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def _bodies(kind: type, needed: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from([*kind.__struct_fields__, "store", "modalities", "junk"])  # type: ignore[attr-defined]
    odd = st.dictionaries(names, _JSON, max_size=4)
    return st.builds(
        lambda fields, good: {**(needed if good else {}), **fields}, odd, st.booleans()
    )


_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "x"])},
    optional={"content": _JSON, "tool_calls": _JSON, "name": _JSON, "junk": _JSON},
)
_CHATS = st.one_of(
    _bodies(ChatRequest, {"messages": [USER]}),
    st.fixed_dictionaries({"messages": st.lists(_MESSAGE, max_size=3)}),
)


async def _never_breaks(path: str, body: Any) -> None:
    transport = httpx.ASGITransport(build_app(ServerState(ServerConfig(), FakeEngine())))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        reply = await client.post(path, json=body, headers=JSON)
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]
    else:
        assert '"error"' not in reply.text


_FUZZ = settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@_FUZZ
@given(_CHATS)
async def test_no_chat_breaks_the_server(body: Any) -> None:
    await _never_breaks(CHAT, body)


@_FUZZ
@given(_bodies(CompletionRequest, {"prompt": "x"}))
async def test_no_completion_breaks_the_server(body: Any) -> None:
    await _never_breaks(TEXT, body)


@_FUZZ
@given(st.one_of(_JSON, st.fixed_dictionaries({}, optional={
    "prompt": _JSON, "messages": _JSON, "tokens": _JSON, "tools": _JSON,
    "add_special_tokens": _JSON, "chat_template_kwargs": _JSON,
})))  # fmt: skip
async def test_no_token_request_breaks_the_server(body: Any) -> None:
    await _never_breaks("/tokenize", body)
    await _never_breaks("/detokenize", body)
