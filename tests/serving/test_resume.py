"""Streams that are cut at any byte and resumed: no gap, no repeat, the same bytes as uncut."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

import toy_parsers as toys
from asgi_caller import Caller, event_ids, last_id, without_ids
from patience import PATIENCE
from quire.config import EngineConfig, ServerConfig
from quire.core.output import EngineCoreOutput
from quire.engine.async_llm import AsyncLLM
from quire.engine.messages import EngineCoreRequest, Outputs
from quire.outputs import FinishReason
from quire.registry import Registry
from quire.serving.app import build_app
from quire.serving.server_state import ServerState
from quire.serving.stream_positions import Position
from scripted_core import ScriptedCore, _scores, plain_text, scripted_engine

STORY = "Größe – 日本語 and 🎈 balloons. The end is near; the END is here. " * 4
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = {"include_usage": True}
SHAPES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "chat": (CHAT, {"messages": MESSAGES}, [STORY]),
    "chat n": (CHAT, {"messages": MESSAGES, "n": 4, "stream_options": USAGE},
               [STORY, "short", "日本" * 9, STORY[7:]]),
    "chat logprobs": (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2,
                             "return_token_ids": True, "prompt_logprobs": 1}, [STORY]),
    "tools": (CHAT, {"messages": MESSAGES, "tools": [
        {"type": "function", "function": {"name": "map"}}]}, [toys.TEXT]),
    "stop": (CHAT, {"messages": MESSAGES, "stop": ["END", "nearby"], "n": 2}, [STORY, "x nearest"]),
    "usage each": (COMPLETIONS, {"prompt": "a", "stream_options": {
        **USAGE, "continuous_usage_stats": True}, "n": 2}, [STORY, "one two"]),
    "interval": (COMPLETIONS, {"prompt": "a", "n": 2, "stream_interval": 7, "logprobs": 2}, [
        STORY, "one two three"]),
    "interval of chat": (CHAT, {"messages": MESSAGES, "stream_interval": 3, "stop": ["END"]}, [
        STORY]),
    "echo": (COMPLETIONS, {"prompt": "A prompt", "echo": True, "logprobs": 2}, [STORY]),
    "prompts": (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2}, [STORY, "one", "two words"]),
    "prompt only": (COMPLETIONS, {"prompt": "a b", "echo": True, "max_tokens": 0}, [STORY]),
}  # fmt: skip
KEEP = {"x-resumable": "true"}


@pytest.fixture(autouse=True)
def parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Registry("output parser", toys.TABLE)
    monkeypatch.setattr("quire.serving.server_state.PARSERS", table)
    monkeypatch.setattr("quire.serving.exchange.time.time", lambda: 1_700_000_000.5)


def served(engine: Any, **options: Any) -> tuple[Any, ServerState]:
    state = ServerState(ServerConfig(**options))
    state.serve(engine, ["thoughts", "toy"])
    return build_app(state), state


def body_of(shape: str) -> tuple[str, dict[str, Any]]:
    path, fields, _ = SHAPES[shape]
    return path, {"max_tokens": 400, "seed": 3, "temperature": 1, "stream": True, **fields}


async def done(caller: Caller) -> Caller:
    async with asyncio.timeout(PATIENCE):
        await caller.task
    return caller


def normal(events: bytes) -> bytes:
    """Without the request's id, and what is derived from it."""
    found = re.search(rb'"id":"((?:chat)?cmpl-[0-9a-f]+)"', events)
    assert found is not None
    return re.sub(rb"call_[0-9a-f]{24}", b"call", events.replace(found.group(1), b"ID"))


def fold(events: bytes) -> tuple[dict[int, list[Any]], Any, int]:
    """What a stream says, whatever its chunks: by choice, then usage and the number of ends."""
    told: dict[int, list[Any]] = {}
    usage, ends = None, events.count(b"data: [DONE]")
    for line in events.splitlines():
        if not line.startswith(b"data: {"):
            continue
        frame = json.loads(line[6:])
        assert "error" not in frame, frame
        if not frame["choices"]:
            usage = frame["usage"]
        for choice in frame["choices"]:
            parts = told.setdefault(choice["index"], ["", "", [], [], [], []])
            said = choice.get("delta") or choice
            parts[0] += said.get("text") or said.get("content") or ""
            parts[1] += said.get("reasoning") or ""
            parts[2] += [said["role"]] if "role" in said else []
            for call in said.get("tool_calls") or ():
                if call.get("id"):
                    parts[3].append([call["id"], call["function"]["name"], ""])
                parts[3][-1][2] += call["function"].get("arguments") or ""
            scores = choice.get("logprobs") or {}
            parts[4] += scores.get("content") or scores.get("token_logprobs") or []
            parts[5] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return told, usage, ends


@pytest.mark.parametrize("shape", SHAPES)
async def test_kept_streams_say_what_others_say(shape: str) -> None:
    path, body = body_of(shape)
    seen = []
    for headers in ({}, KEEP):
        engine, _ = scripted_engine(SHAPES[shape][2])
        app, state = served(engine)
        caller = await done(Caller(app, "POST", path, body, headers))
        assert caller.status == 200 and caller.is_complete
        seen.append(caller)
        assert state.kept.now().ended == len(headers)
    plain, kept = seen
    assert b"\nid: " not in plain.data and "x-stream-id" not in plain.headers
    if len(fold(plain.data)[0]) == 1:
        assert normal(without_ids(kept.data)) == normal(plain.data)
    assert fold(normal(kept.data)) == fold(normal(plain.data))
    ids = event_ids(kept.data)
    assert all(ids) and len(set(ids)) == len(ids)
    assert all(one.startswith(f"{kept.stream_id}:") for one in ids)


@pytest.mark.parametrize("shape", SHAPES)
async def test_cut_anywhere_and_resumed(shape: str) -> None:
    path, body = body_of(shape)
    rng = random.Random(shape)
    engine, _ = scripted_engine(SHAPES[shape][2])
    app, _ = served(engine)
    first = await done(Caller(app, "POST", path, body, KEEP))
    length = len(first.data)
    for trial in range(25):
        cut = rng.randrange(1, length) if trial else 1
        part = await done(Caller(app, "POST", path, body, KEEP, cut=cut))
        received, last = b"", ""
        while True:
            whole, now = part.whole_events()
            received, last = received + whole, now or last
            if part.is_complete:
                break
            assert len(part.data) < length, "the reply never ends"
            cut = rng.choice([None, rng.randrange(1, length)])
            part = await done(resumed(app, rng, part.stream_id, path, body, last, cut))
        url = f"/v1/streams/{part.stream_id}"
        uncut = await done(Caller(app, "GET", url))
        assert received == uncut.data
        assert fold(received) == fold(uncut.data)
        again = await done(Caller(app, "GET", url, headers={"last-event-id": last}))
        assert (again.status, again.data, again.is_complete) == (200, b"", True)


def resumed(
    app: Any,
    rng: random.Random,
    stream_id: str,
    path: str,
    body: dict[str, Any],
    last: str,
    cut: int | None,
) -> Caller:
    """One of the ways to go on."""
    url, header = f"/v1/streams/{stream_id}", {"last-event-id": last}
    if not last:
        return Caller(app, "GET", url, cut=cut)
    way = rng.randrange(3)
    if way == 0:
        return Caller(app, "GET", url, headers=header, cut=cut)
    if way == 1:
        return Caller(app, "GET", f"{url}?after={last}", cut=cut)
    return Caller(app, "POST", path, body, header, cut=cut)


OTHER_APIS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 400, "tools": [
        {"name": "map", "input_schema": {"type": "object"}}]},
    "/v1/responses": {"input": "hi", "store": False, "tools": [
        {"type": "function", "name": "map", "parameters": {"type": "object"}}]},
}  # fmt: skip


@pytest.mark.parametrize("path", OTHER_APIS)
async def test_every_api_has_ids_and_can_be_resumed(path: str) -> None:
    body = {"stream": True, "temperature": 1, **OTHER_APIS[path]}
    same = {"x-request-id": "same"}
    engine, _ = scripted_engine([toys.TEXT])
    app, _ = served(engine)
    plain = await done(Caller(app, "POST", path, body, same))
    engine, _ = scripted_engine([toys.TEXT])
    app, _ = served(engine)
    kept = await done(Caller(app, "POST", path, body, KEEP | same))
    assert plain.status == kept.status == 200 and plain.data
    assert without_ids(kept.data) == plain.data
    ids = event_ids(kept.data)
    assert all(ids) and len(set(ids)) == len(ids) > 10
    rng = random.Random(path)
    for _ in range(10):
        part = await done(Caller(app, "POST", path, body, KEEP, cut=rng.randrange(400, 4000)))
        whole, last = part.whole_events()
        rest = await done(resumed(app, rng, part.stream_id, path, body, last, None))
        uncut = await done(Caller(app, "GET", f"/v1/streams/{part.stream_id}"))
        assert whole + rest.data == uncut.data


class CutCore(ScriptedCore):
    """Gives all choices what they have at a place, then the unit of that place, then the rest: as a
    journal is rendered again."""

    place: Position | None = None

    def _end(self, requests: list[EngineCoreRequest]) -> None:
        if self.place is None:
            return super()._end(requests)
        if not self.speaking:
            self.speaking.add(asyncio.ensure_future(self._speak_all()))
        return None

    async def _speak_all(self) -> None:
        await asyncio.sleep(0.01)  # until all prompts are there
        place = self.place
        assert place is not None
        counts = list(place.before) or [0] * len(self.sent)
        for choice, request in enumerate(self.sent):
            if counts[choice] or choice in place.ended:
                self._say(request, 0, counts[choice], choice in place.ended)
        for _ in range(50):  # the prompts' outputs are taken in this order
            await asyncio.sleep(0)
        if place.stage == "unit":
            start = counts[place.choice]
            counts[place.choice] += place.tokens
            self._say(self.sent[place.choice], start, counts[place.choice], place.ends)
        for _ in range(50):
            await asyncio.sleep(0)
        for choice, request in enumerate(self.sent):
            is_done = choice in place.ended or (place.ends and choice == place.choice)
            for start in range(counts[choice], 0 if is_done else 10**6):
                if not self._say(request, start, start + 1, False):
                    break

    def _say(self, request: EngineCoreRequest, start: int, end: int, ends: bool) -> bool:
        """Tokens of a choice; whether there were any, and more may come."""
        params = request.sampling_params
        tokens = self.texts[self.sent.index(request) % len(self.texts)]
        tokens = [*tokens, min(plain_text.eos_ids())][: params.max_tokens]
        piece = tokens[start:end]
        if (not piece and not ends) or request.request_id in self.aborted:
            return False
        scores = prompt = reason = None
        if end >= len(tokens):
            cut = len(tokens) == params.max_tokens
            reason = FinishReason.LENGTH if cut else FinishReason.STOP
        if params.logprobs is not None:
            scores = [_scores(token, params.logprobs) for token in piece]
        if params.prompt_logprobs is not None and start == 0:
            ids = request.prompt_token_ids
            prompt = [None, *(_scores(token, params.prompt_logprobs) for token in ids[1:])]
        self._number += 1
        output = EngineCoreOutput(request.request_id, piece, scores, prompt, reason)
        self._on_message(Outputs(self.epoch, self._number, [output]))
        return True


def cut_engine(texts: Sequence[str], place: Position) -> AsyncLLM:
    made: list[CutCore] = []

    def make(*args: Any) -> CutCore:
        made.append(CutCore(*args))
        return made[-1]

    engine = AsyncLLM(EngineConfig.from_options(), entropy=b"fixed", make_core=make)
    engine.supervisor.start()
    engine.supervisor.state = "ready"
    made[-1].texts = [engine.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    made[-1].place = place
    return engine


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_rendering_made_again_from_the_tokens_goes_on_after_any_id(shape: str) -> None:
    path, body = body_of(shape)
    texts = SHAPES[shape][2]
    rng = random.Random(shape)
    engine, _ = scripted_engine(texts, seed=5)
    app, _ = served(engine)
    first = await done(Caller(app, "POST", path, body, KEEP | {"x-request-id": "same"}))
    ids = event_ids(first.data)
    for event_id in {ids[0], ids[-1], *rng.sample(ids, min(12, len(ids)))}:
        place = Position.read(event_id.partition(":")[2])
        assert place is not None
        app, _ = served(cut_engine(texts, place))
        again = await done(Caller(app, "POST", path, body, KEEP | {"x-request-id": "same"}))
        assert again.is_complete
        same_stream = again.data.replace(again.stream_id.encode(), first.stream_id.encode())
        line = b"\nid: %b\n\n" % event_id.encode()
        assert line in same_stream, f"the place {place} is not in the new rendering"
        head, rest = first.data.partition(line)[0] + line, same_stream.partition(line)[2]
        assert fold(head + rest) == fold(first.data), event_id
        later = set(event_ids(rest))
        assert not later & set(event_ids(head)), "an event has the id of one before it"


def test_places_are_read_as_they_are_written() -> None:
    assert Position.read("17~1.2") == Position("unit", (17,), frozenset(), 0, 1, False, 2)
    assert Position.read("9,8*2,12f/1~3f.1") == Position(
        "unit", (9, 8, 8, 12), frozenset({3}), 1, 3, True, 1
    )
    assert Position.read("end.2") == Position("end", event=2)
    for bad in ("", "17", "17+1", "x~1.1", "1,~1.1", "1*x/0~1.1", "-1~1.1", "1~1.1 "):
        assert Position.read(bad) is None, bad


def test_last_id() -> None:
    assert last_id(b"data: {}\nid: a:1\n\n") == "a:1"
