"""The API process is killed in the middle of replies of every kind, and started again: each client
gets the rest, with the bytes and event ids that the same request has without a fault."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import Server
from patience import PATIENCE, wait_for
from test_restart import Client, kill
from thinking_model import CLOSE, make_thinking_model

TURN = [{"role": "user", "content": "Tell me a story"}]
LONGEST = {"temperature": 1.0, "seed": 269}
"""Of 300 seeds the one whose story is longest: 152 tokens, at which this kind of request ends."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1200},
        "size": {"type": "integer"},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
FORM = {"name": "thing", "schema": SCHEMA}
TOOL = {"name": "look_up", "description": "Looks up.", "parameters": SCHEMA}
LONG = {"ignore_eos": True, "seed": 5, "temperature": 1.0}
CHOICES = {"choice": [f"the {word} fox and " * 60 for word in ("red", "big")]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "chat/completions", {"messages": TURN, "max_tokens": 1200, "logprobs": True, **LONG},
    ),
    "chat, unseeded, n = 2": (
        "chat/completions",
        {"messages": TURN, "max_tokens": 800, "n": 2, "temperature": 1, "ignore_eos": True},
    ),
    "chat, json schema": (
        "chat/completions",
        {"messages": TURN, "max_tokens": 1200, "seed": 3,
         "response_format": {"type": "json_schema", "json_schema": FORM}},
    ),
    "chat, a tool": (
        "chat/completions",
        {"messages": TURN, "max_tokens": 1200, "seed": 4, "tool_choice": "required",
         "tools": [{"type": "function", "function": TOOL}]},
    ),
    "completions, regex": (
        "completions",
        {"prompt": "Once", "max_tokens": 1200, "seed": 6,
         "structured_outputs": {"regex": "[a-z ]{1800,1900}[0-9]"}},
    ),
    "completions, choice": (
        "completions",  # with log-probabilities, because forced tokens come one by one then
        {"prompt": "Once", "max_tokens": 1200, "seed": 11, "logprobs": 1,
         "structured_outputs": CHOICES},
    ),
    "completions, GBNF": (
        "completions",
        {"prompt": "Once", "max_tokens": 1200, "seed": 12,
         "structured_outputs": {"grammar": 'root ::= "(" root ")" | [a-z ]{1800,1900} [0-9]'}},
    ),
    "completions, a form after free text": (
        "completions",
        {"prompt": "Once", "max_tokens": 1200, "seed": 13,
         "structured_outputs": {
             "regex": "[a-z ]{1800,1900}[0-9]",
             "reasoning": {"opening": "Hm:", "closing": ".", "is_open": True}}},
    ),
    "chat, structural tag": (
        "chat/completions",
        {"messages": TURN, "max_tokens": 1200, "seed": 14,
         "response_format": {"type": "structural_tag", "format": {
             "type": "tag", "begin": "<a>", "end": "</a>",
             "content": {"type": "regex", "pattern": "[a-z ]{1800,1900}"}}}},
    ),
    "messages": ("messages", {"messages": TURN, "max_tokens": 1200, **LONGEST}),
    "messages, json schema": (
        "messages",
        {"messages": TURN, "max_tokens": 1200, "seed": 7,
         "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
    "messages, a tool": (
        "messages",
        {"messages": TURN, "max_tokens": 1200, "seed": 8, "tool_choice": {"type": "any"},
         "tools": [{"name": "look_up", "input_schema": SCHEMA}]},
    ),
    "responses": ("responses", {"input": TURN, "max_output_tokens": 1200, **LONG}),
    "responses, json schema": (
        "responses",
        {"input": TURN, "max_output_tokens": 1200, "seed": 9,
         "text": {"format": {"type": "json_schema", **FORM}}},
    ),
    "responses, a tool": (
        "responses",
        {"input": TURN, "max_output_tokens": 1200, "seed": 10, "tool_choice": "required",
         "tools": [{"type": "function", **TOOL}]},
    ),
}  # fmt: skip

THOUGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": TURN, "max_tokens": 1200, **LONG}),
    "messages": ("messages", {"messages": TURN, "max_tokens": 1200, **LONGEST}),
    "responses": ("responses", {"input": TURN, "max_output_tokens": 1200, **LONG}),
}
OPENED = {"chat_template_kwargs": {"enable_thinking": True}, "temperature": 1.0}
BUDGET = {**OPENED, "thinking_token_budget": 300, "logit_bias": {str(CLOSE): -100.0}}
BUDGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, a budget": (
        "chat/completions",
        {"messages": TURN, "max_tokens": 1200, "ignore_eos": True, "seed": 15, **BUDGET},
    ),
    "chat, a budget, then a schema": (
        "chat/completions",
        {"messages": TURN, "max_tokens": 1500, "seed": 16, **BUDGET,
         "response_format": {"type": "json_schema", "json_schema": FORM}},
    ),
    "chat, a budget, then a tool": (
        "chat/completions",
        {"messages": TURN, "max_tokens": 1500, "seed": 17, "tool_choice": "required", **BUDGET,
         "tools": [{"type": "function", "function": TOOL}]},
    ),
    "responses, a budget, then a schema": (
        "responses",
        {"input": TURN, "max_output_tokens": 1500, "seed": 18, **BUDGET,
         "text": {"format": {"type": "json_schema", **FORM}}},
    ),
}  # fmt: skip
LAST = ("message_stop", "response.completed", "response.incomplete")
PASSING = ("sequence_number", "completed_at")
"""What depends on how tokens were grouped into events, or on the clock."""


class Reply(Client):
    """Reads one stream of any API."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        self.path, self.body = path, {"model": "quire-demo", "stream": True} | body
        self.ids: list[str] = []
        self.kind, self.status = path, 0
        self.events: list[str] = []
        self.last = self.stream = self.told = self.said = ""
        self.start(self._open, url)

    def _open(self, url: str) -> None:
        self._read("POST", f"{url}/v1/{self.path}", {"X-Resumable": "true"}, self.body)

    @property
    def is_done(self) -> bool:
        last = self.events[-1] if self.events else ""
        return last == "data: [DONE]" or any(f'"type":"{kind}"' in last for kind in LAST)


def fold(events: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """What a stream says, however its tokens were grouped: all deltas of each place joined, and all
    other events as they are."""
    joined: dict[str, Any] = {}
    others: list[Any] = []

    def add(place: tuple[Any, ...], value: Any) -> None:
        if value is not None:
            key = str(place)
            joined[key] = joined[key] + value if key in joined else value

    for event in events:
        if event == "data: [DONE]":
            others.append(event)
            continue
        told = without_passing(json.loads(event[6:]))
        assert "error" not in told or told["error"] is None, told
        if told.get("choices"):
            for choice in told["choices"]:
                index = choice["index"]
                delta = choice.get("delta", {"text": choice.get("text")})
                for call in delta.pop("tool_calls", None) or ():
                    for key, value in (call | call.pop("function")).items():
                        if key != "index":
                            add((index, call["index"], key), value)
                for key, value in delta.items():
                    add((index, key), value)
                add((index, "ends"), choice["finish_reason"])
                add((index, "logprobs"), (choice.get("logprobs") or {}).get("content"))
        elif isinstance(delta := told.get("delta"), str):
            add((told["type"], told["output_index"]), delta)
        elif told.get("type") == "content_block_delta":
            kind, text = delta.values()
            add((told["index"], kind), text)
        else:
            if told.get("type") == "message_start":  # how many its first output had
                del told["message"]["usage"]["output_tokens"]
            others.append(told)
    return joined, others


def without_passing(told: Any) -> Any:
    if isinstance(told, dict):
        return {key: without_passing(value) for key, value in told.items() if key not in PASSING}
    return [without_passing(one) for one in told] if isinstance(told, list) else told


def without_names(told: Any, stream: str) -> str:
    """To compare two requests: without ids, times and hits in the prefix cache."""
    names = r"(?:chatcmpl|cmpl|msg|resp|call|toolu|fc|rs)[-_][0-9a-f]{8,}"
    counts = r"'(?:created(?:_at)?|cached_tokens|input_tokens|cache_read_input_tokens)': \d+"
    return re.sub(f"{names}|{counts}", "NAME", repr(told).replace(stream, "STREAM"))


def check(reply: Reply, url: str) -> None:
    """The client's parts make up the reply, as the server has it whole now, and as the same request
    gets it when nothing happens."""
    assert reply.is_done, (reply.path, reply.status, reply.said)
    cut = list(reply.events), list(reply.ids)
    reply.events, reply.ids, reply.last = [], [], ""
    reply.come_back(url)
    assert fold(cut[0]) == fold(reply.events)
    places = {name: k for k, name in enumerate(reply.ids)}
    shared = [(k, places[name]) for k, name in enumerate(cut[1]) if name in places]
    assert len(shared) > 20
    for here, there in shared[:: len(shared) // 20]:
        assert fold(cut[0][: here + 1]) == fold(reply.events[: there + 1]), cut[1][here]
    seeded = reply.body if "seed" in reply.body else reply.body | {"seed": reply.seed()}
    again = Reply(url, reply.path, seeded)
    again.join()
    assert without_names(fold(again.events), again.stream) == without_names(
        fold(reply.events), reply.stream
    )


@pytest.mark.parametrize(
    ("kinds", "flags"),
    [(KINDS, ()), (THOUGHTS, ("--reasoning-parser", "deepseek_r1")), (BUDGETS, ())],
    ids=["answers", "reasoning", "budgets"],
)
def test_the_rest_of_every_kind_is_the_same(
    kinds: dict[str, tuple[str, dict[str, Any]]], flags: tuple[str, ...], tmp_path: Path
) -> None:
    cache = ("--kv-cache-memory-bytes", str(64 * 2**20))
    if kinds is BUDGETS:
        model = make_thinking_model(tmp_path / "thinking")
        flags = ("--model", str(model), "--served-model-name", "quire-demo")
    flags = ("--journal-dir", str(tmp_path / "journal"), *cache, *flags)
    server = Server(*flags)
    replies: dict[str, Reply] = {}
    for last in (False, True):  # the one that may end by itself comes last
        for name in (name for name in kinds if (name == "messages") == last):
            replies[name] = Reply(server.url, *kinds[name])
        for reply in replies.values():
            wait_for(lambda r=reply: len(r.events) >= 25 or r.is_done)
    kill(server)
    server = Server(*flags)
    for name, reply in replies.items():
        reply.join()
        assert not reply.is_done, f"{name}: it had ended before the kill"
        reply.start(reply.come_back, server.url)
    for name, reply in replies.items():
        reply.join()
        check(reply, server.url)
        joined, others = fold(reply.events)
        assert ("look_up" in str([joined, others])) == ("tool" in name), name
        thinks = any("reasoning" in place or "thinking" in place for place in joined)
        assert thinks == (kinds is not KINDS), name
    assert "Tell me a story" not in server.log
    server.stop()


def test_embeddings_are_in_the_journal_too(tmp_path: Path) -> None:
    """A client that sends its request again, with the same key, gets its reply from the process
    that came next: what was computed before the kill is not computed again."""
    inputs = [f"sentence {k} of a long list of sentences" for k in range(600)]
    body = {"model": "quire-demo", "input": inputs}
    headers = {"Idempotency-Key": "one", "X-Request-Id": "mine"}
    flags = ("--runner", "pooling", "--journal-dir", str(tmp_path / "journal"))
    flags = (*flags, "--max-num-batched-tokens", "64", "--no-enable-prefix-caching")
    server = Server(*flags)
    where = f"{server.url}/v1/embeddings"
    wanted = httpx.post(where, json=body, timeout=PATIENCE).json()

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(where, json=body, headers=headers, timeout=PATIENCE)

    thread = threading.Thread(target=ask)
    thread.start()
    before = server.metric("vllm:request_success_total")
    wait_for(lambda: server.metric("vllm:request_success_total") >= before + 50)
    kill(server)
    thread.join(PATIENCE)
    server = Server(*flags)
    where = f"{server.url}/v1/embeddings"
    got: list[httpx.Response] = []

    def retry() -> bool:
        got.append(httpx.post(where, json=body, headers=headers, timeout=PATIENCE))
        return got[-1].status_code != 503

    wait_for(retry)
    assert got[-1].status_code == 200, got[-1].text
    assert got[-1].headers["idempotent-replayed"] == "true", "it was accepted once"
    told = got[-1].json()
    assert told["id"] == "embd-mine"
    assert told["data"] == wanted["data"] and told["usage"] == wanted["usage"]
    computed = server.metric("vllm:prompt_tokens_total")
    assert 0 < computed < told["usage"]["prompt_tokens"], "the rest, and not all of it"
    assert "sentence 3 of" not in server.log
    server.stop()
