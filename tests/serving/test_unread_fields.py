"""Fields that nothing reads: those that change nothing are taken everywhere; of the others a server
refuses the request, or leaves them out and says so."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

import quire.logger
from fake_engine import FakeEngine
from quire.config import ServerConfig
from quire.errors import ConfigError, InvalidRequest
from quire.serving.app import ROUTES, build_app
from quire.serving.decode import decode
from quire.serving.pooling.schema import PoolingBase
from quire.serving.server_state import ServerState
from quire.serving.unread_fields import (
    CHANGES_NOTHING,
    MAX_LOGGED,
    MAX_TOLD,
    UnknownFields,
    UnreadFields,
    begin,
)

USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/chat/completions/batch": {"messages": [[USER]]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions/render": {"messages": [USER]},
    "/v1/completions/render": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/messages/render": {"messages": [USER], "max_tokens": 3},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/invocations": {"prompt": "hi"},
}
"""The least that each route for text takes."""
SAMPLES: dict[str, tuple[Any, ...]] = {
    "metadata": ({}, {"user_id": "1"}),
    "client_metadata": ({"x": "y"},),
    "cache_prompt": (True, False),
    "keep_alive": ("5m", 0, 1.5),
    "store": (False,),
    "safe_prompt": (False,),
}


@asynccontextmanager
async def served(engine: FakeEngine | None = None, **options: Any) -> AsyncIterator[Any]:
    state = ServerState(ServerConfig(**options), engine or FakeEngine())
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def test_every_route_for_text_is_here() -> None:
    """The record types of the others are tested below."""
    rows = {path: ROUTES.get(path) for path in ROUTES}
    typed = {
        path for path, row in rows.items() if row.body and not issubclass(row.body, PoolingBase)
    }
    assert typed - set(BODIES) == {"/limits"}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", CHANGES_NOTHING)
async def test_what_changes_nothing_is_taken_and_changes_nothing(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, name: str
) -> None:
    for value in (None, *SAMPLES.get(name, ("some text",))):
        reply = await client.post(path, json=BODIES[path] | {name: value})
        assert reply.status_code == 200, reply.text
        assert "x-ignored-fields" not in reply.headers, "nothing was lost"
    plain = await client.post(path, json=BODIES[path])
    assert plain.status_code == 200
    assert len({str(prompt) + str(params) for prompt, params, *_ in engine.submitted}) <= 1


BODY_TYPES = sorted(
    {spec.body for path in ROUTES if (spec := ROUTES.get(path)).body is not None},
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", BODY_TYPES, ids=lambda kind: kind.__name__)
def test_every_record_goes_the_same_way(kind: type[msgspec.Struct]) -> None:
    """What is wrong with the body is then another thing: a field that it needs."""
    told = []
    for extra in ({"client_metadata": {}}, {"nonsense": 1}):
        try:
            decode(kind, msgspec.json.encode(extra), {})
            told.append("")
        except InvalidRequest as error:
            told.append(error.message)
    assert "client_metadata" not in told[0] and told[1].startswith("Unknown field `nonsense`.")


async def test_a_label_of_another_type_is_refused(client: httpx.AsyncClient) -> None:
    for name, value, words in (
        ("client_metadata", "x", "must be an object, got"),
        ("keep_alive", [], "must be a string or"),
        ("store", True, "must be false, got true: nothing is stored"),
        ("safe_prompt", True, "must be false"),
    ):
        reply = await client.post("/v1/completions", json={"prompt": "a", name: value})
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == name and words in error["message"]


async def test_a_typing_error_is_refused_with_what_was_meant(client: httpx.AsyncClient) -> None:
    for path, body in BODIES.items():
        near = "prompts" if "prompt" in body else "modell"
        reply = await client.post(path, json=body | {near: None})
        assert reply.status_code == 400, path
        assert f"Did you mean `{near[:-1]}`?" in reply.json()["error"]["message"]


# ---- --unknown-request-fields ignore -------------------------------------------------------------


async def test_an_ignored_field_is_told_in_the_reply_and_once_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine()
    async with served(engine, unknown_request_fields="ignore") as client:
        for path, body in BODIES.items():
            for _ in range(3):
                reply = await client.post(path, json=body | {"temprature": 0.5})
                assert reply.status_code == 200, (path, reply.text)
                assert reply.headers["x-ignored-fields"] == "temprature"
    assert [record.args for record in caplog.records if "temprature" in record.getMessage()] == [
        ("temprature",)
    ]
    assert engine.submitted
    assert all(params.temperature != 0.5 for _, params, *_ in engine.submitted)


NESTED = [
    ("/v1/chat/completions", {"messages": [{**USER, "mood": 1}]}, "messages[0].mood"),
    ("/v1/chat/completions", {"messages": [USER], "stream": True, "stream_options": {"x": 1}},
     "stream_options.x"),
    ("/v1/messages", {"messages": [{**USER, "mood": 1}], "max_tokens": 2}, "messages[0].mood"),
    ("/v1/messages", {"messages": [USER], "max_tokens": 2, "metadata": {"user": "x"}},
     "metadata.user"),
    ("/v1/responses", {"input": [{**USER, "mood": 1}]}, "input[0].mood"),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"mood": 1}},
     "sampling_params.mood"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "place"), NESTED)
async def test_a_field_within_an_object(path: str, body: dict[str, Any], place: str) -> None:
    async with served() as client:
        reply = await client.post(path, json=body)
        assert reply.status_code == 400 and reply.json().get("error")
        assert "nknown field" in reply.text
    async with served(unknown_request_fields="ignore") as client:
        reply = await client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-ignored-fields"] == place


async def test_what_is_known_stays_refused() -> None:
    async with served(unknown_request_fields="ignore") as client:
        for field in ({"suffix": "x"}, {"temperature": "warm"}, {"store": True}):
            reply = await client.post("/v1/completions", json={"prompt": "a", "xyz": 1, **field})
            assert reply.status_code == 400 and next(iter(field)) in reply.text


async def test_names_are_bounded_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    async with served(unknown_request_fields="ignore") as client:
        for start in range(0, 3 * MAX_LOGGED, 50):
            names = {f"field_{i}": 0 for i in range(start, start + 50)}
            reply = await client.post("/v1/completions", json={"prompt": "a", **names})
            assert len(reply.headers["x-ignored-fields"].split(", ")) == MAX_TOLD
        bad = {"a\r\nset-cookie: x": 1, "ü": 2, "x" * 5000: 3}
        reply = await client.post("/v1/completions", json={"prompt": "a", **bad})
        assert reply.status_code == 200 and "set-cookie" not in reply.headers
        assert "x-ignored-fields" not in reply.headers
    logged = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert len(logged) == MAX_LOGGED + 1 and "no more are logged" in logged[-1]
    assert all(line.isascii() and line.isprintable() for line in logged)


def test_the_log_has_one_line_for_a_field_of_all_messages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fields = UnreadFields(UnknownFields(ignore=True))
    for i in range(5):
        fields.unknown("mood", (), f"messages[{i}]")
    assert [r.getMessage() for r in caplog.records] == [
        "the unknown request field messages[].mood is ignored"
    ]
    begin(fields)


async def test_a_stream_tells_it_and_so_does_a_kept_reply() -> None:
    async with served(unknown_request_fields="ignore") as client:
        body = {"prompt": "a", "stream": True, "moode": 1}
        headers = {"Idempotency-Key": "k"}
        for extra in ({}, headers, headers):
            reply = await client.post("/v1/completions", json=body, headers=extra)
            assert reply.headers["x-ignored-fields"] == "moode"
        assert reply.headers["idempotent-replayed"] == "true"


def test_the_option_has_two_values() -> None:
    with pytest.raises(ConfigError, match="--unknown-request-fields must be one of refuse, ignore"):
        ServerConfig(unknown_request_fields="allow")


# ---- priority ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
     "/inference/v1/generate"],
)  # fmt: skip
async def test_a_priority_without_effect(
    path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quire.logger, "_said", set())
    for policy, told in (("fcfs", "priority"), ("priority", None)):
        engine = FakeEngine(policy=policy)
        async with served(engine) as client:
            for body, headers in (({"priority": -3}, {}), ({}, {"X-Vllm-Priority": "-3"})):
                reply = await client.post(path, json=BODIES[path] | body, headers=headers)
                assert reply.status_code == 200, reply.text
                assert reply.headers.get("x-ignored-fields") == told
                assert engine.submitted[-1][3] == -3
            reply = await client.post(path, json=BODIES[path] | {"priority": 0})
            assert "x-ignored-fields" not in reply.headers
    logged = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(logged) == 1 and "--scheduling-policy priority" in logged[0].getMessage()


# ---- --enable-force-include-usage ----------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
async def test_usage_is_sent_unasked(path: str, options: dict[str, Any]) -> None:
    for forced in (False, True):
        async with served(enable_force_include_usage=forced) as client:
            body = BODIES[path] | {"stream": True} | options
            text = (await client.post(path, json=body)).text
            assert ('"prompt_tokens":' in text) is forced
            whole = await client.post(path, json=BODIES[path])
            assert whole.json()["usage"]["prompt_tokens"] > 0
