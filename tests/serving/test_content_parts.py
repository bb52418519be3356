"""Lists of content parts: texts are joined, and everything else is refused by its name and place,
in every API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
URL = "data:image/png;base64,AAAA"


def body(path: str, parts: list[Any], role: str = "user") -> dict[str, Any]:
    turn = {"role": role, "content": parts}
    if path == RESPONSES:
        return {"input": [turn]}
    return {"messages": [turn], "max_tokens": 3, "model": "quire-demo"}


def prompt(engine: FakeEngine) -> str:
    return bytes(token for token in engine.submitted[-1][0] if token < 256).decode()


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        (CHAT, ("text", "text")),
        (CHAT, ("input_text", "text")),
        (CHAT, ("output_text", "input_text")),
        (RESPONSES, ("input_text", "input_text")),
        (MESSAGES, ("text", "text")),
    ],
)
async def test_texts_are_joined_by_newlines(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, kinds: tuple[str, str]
) -> None:
    parts = [{"type": kind, "text": text} for kind, text in zip(kinds, ("one", "two"), strict=True)]
    for given in (parts, "one\ntwo"):
        reply = await client.post(path, json=body(path, given))  # type: ignore[arg-type]
        assert reply.status_code == 200, reply.text
    both = [bytes(t for t in one[0] if t < 256).decode() for one in engine.submitted[-2:]]
    assert both[0] == both[1] and "one\ntwo" in both[0]


MEDIA: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"type": "image_url", "image_url": {"url": URL}}),
    (CHAT, {"type": "image_pil", "image_pil": "x"}),
    (CHAT, {"type": "image_embeds", "image_embeds": "x"}),
    (CHAT, {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}),
    (CHAT, {"type": "audio_url", "audio_url": {"url": URL}}),
    (CHAT, {"type": "video_url", "video_url": {"url": URL}}),
    (CHAT, {"type": "file", "file": {"file_id": "x"}}),
    (RESPONSES, {"type": "input_image", "image_url": URL, "detail": "auto"}),
    (RESPONSES, {"type": "input_file", "file_id": "x"}),
    (RESPONSES, {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}),
    (RESPONSES, {"type": "input_video", "video_url": URL}),
    (MESSAGES, {"type": "image", "source": {"type": "url", "url": URL}}),
    (MESSAGES, {"type": "document", "source": {"type": "url", "url": URL}}),
    (MESSAGES, {"type": "audio", "source": {"type": "url", "url": URL}}),
    (MESSAGES, {"type": "video", "source": {"type": "url", "url": URL}}),
]


@pytest.mark.parametrize(("path", "part"), MEDIA, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("first", [True, False])
async def test_media_are_refused_by_name_and_place(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, part: dict[str, Any], first: bool
) -> None:
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "see"}
    parts = [part] if first else [text, part]
    reply = await client.post(path, json=body(path, parts))
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    where = "input[0]" if path == RESPONSES else "messages[0]"
    assert f"{where}.content[{len(parts) - 1}]" in message
    assert part["type"] in message and URL not in message
    assert not engine.submitted


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/tokenize"])
async def test_other_doors_of_chat_read_the_same_parts(
    client: httpx.AsyncClient, path: str
) -> None:
    for part in (part for where, part in MEDIA if where == CHAT):
        given = {"messages": [{"role": "user", "content": [part]}]}
        reply = await client.post(path, json=given)
        assert reply.status_code == 400 and part["type"] in reply.text


async def test_results_of_tools_and_system_prompts_may_be_lists(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    texts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    turns = [
        {"role": "system", "content": texts},
        {"role": "user", "content": "hi"},
        {"role": "tool", "tool_call_id": "x", "content": texts},
    ]
    assert (await client.post(CHAT, json={"messages": turns})).status_code == 200
    assert prompt(engine).count("one\ntwo") == 2
    result = {"type": "tool_result", "tool_use_id": "x", "content": texts}
    given = body(MESSAGES, [result]) | {"system": texts}
    assert (await client.post(MESSAGES, json=given)).status_code == 200
    assert prompt(engine).count("one\ntwo") == 2
