"""Mixed requests over HTTP, what came of each, and what should have come.

An `Outcome` holds everything that a caller can see of a reply except ids and times, in one form for
streamed and whole replies, so two of them can be compared with `==`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from core_hook import prompt

SECRET = "xylophonic-marmalade"
"""A word of every prompt. It may stand in no log."""
STORY = f"Once upon a time there was a small fox, called {SECRET}, at the edge of the forest. "
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
Body = dict[str, Any]

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
}}}  # fmt: skip

FLAT_TOOL = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]

ROWS = {
    "type": "array",
    "minItems": 3,
    "items": {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "hare", "owl"]}, "age": {"type": "integer"}},
        "required": ["animal", "age"],
        "additionalProperties": False,
    },
}
KINDS: dict[str, Callable[[int], Body]] = {
    "greedy": lambda i: {"temperature": 0},
    "seeded": lambda i: {"temperature": 1, "seed": i, "top_p": 0.9},
    "unseeded": lambda i: {"temperature": 1.2, "top_k": 50},
    "n4": lambda i: {"temperature": 1, "seed": i, "n": 4},
    "penalties": lambda i: {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5,
                            "frequency_penalty": 0.3},
    "stop": lambda i: {"temperature": 1, "seed": i, "stop": ["the end", " and they", "zzz"]},
    "logprobs": lambda i: {"temperature": 0.8, "seed": i, "logprobs": 3},
    "named_logprobs": lambda i: {"temperature": 0.8, "seed": i, "logprob_token_ids": [5, 300, 17],
                                 "stream_interval": 1 + i % 9, "n": 2},
    "prompt_logprobs": lambda i: {"temperature": 0, "prompt_logprobs": 2},
    "bias": lambda i: {"temperature": 1, "seed": i, "logit_bias": {"300": 2.5}, "min_tokens": 9},
    "loops": lambda i: {"temperature": 0.2, "seed": i, "repetition_detection": {
        "max_pattern_size": 16, "min_pattern_size": 2, "min_count": 2 + i % 3}},
    "tools": lambda i: {"temperature": 1, "seed": i, "tools": [TOOL], "tool_choice": "required"},
    "free_tools": lambda i: {"temperature": 0, "tools": [TOOL], "include_reasoning": True},
    "json": lambda i: {"temperature": 1, "seed": i, "response_format": {
        "type": "json_schema", "json_schema": {"name": "list", "schema": ROWS}}},
    "regex": lambda i: {"temperature": 1, "seed": i, "n": 2, "logprobs": 1,
                        "structured_outputs": {"regex": r"(fox|day) \d{2}( and [a-z]{1,6}){9,20}"}},
    "responses": lambda i: {"temperature": 1, "seed": i},
    "responses_tools": lambda i: {"temperature": 1, "seed": i, "tools": [FLAT_TOOL],
                                  "tool_choice": "required"},
    "messages": lambda i: {"temperature": 1, "seed": i},
    "messages_json": lambda i: {"temperature": 1, "seed": i, "output_config": {
        "format": {"type": "json_schema", "schema": ROWS}}},
}  # fmt: skip
"""What requests ask for, by name; a name that begins with that of an API is for it. A feature whose
state must survive a fault adds its row."""


@dataclass(frozen=True)
class Ask:
    """One request."""

    name: str
    path: str
    body: Body


def mixed_asks(count: int, max_tokens: int = 96) -> list[Ask]:
    """Requests of every kind, by turns chat and completions, streamed and whole."""
    kinds, asks = list(KINDS), []
    for i in range(count):
        kind = kinds[i % len(kinds)]
        chat, stream = (i // len(kinds)) % 2 == 1, (i // 2) % 4 != 3
        fields = dict(KINDS[kind](i))
        chat = chat or "tools" in fields
        text = STORY * (1 + i % 5) + f"On day {i}"
        if kind.startswith(("responses", "messages")):
            asks.append(_of_api(f"{i}-{kind}", kind, text, max_tokens, stream, fields))
            continue
        if chat:
            where: Body = {"messages": [{"role": "user", "content": text}]}
            if "logprobs" in fields:
                fields |= {"logprobs": True, "top_logprobs": 3}
        else:
            where = {"prompt": text}
        body: Body = {"model": "quire-demo", **where, "max_tokens": max_tokens - 8 * (i % 5)}
        body |= {"ignore_eos": True, "stream": stream, **fields}
        if stream:
            body["stream_options"] = {"include_usage": True}
        asks.append(Ask(f"{i}-{kind}", CHAT if chat else COMPLETIONS, body))
    return asks


def _of_api(name: str, kind: str, text: str, max_tokens: int, stream: bool, fields: Body) -> Ask:
    """A request of the API that its kind begins with."""
    body: Body = {"model": "quire-demo", "stream": stream, **fields}
    if kind.startswith("responses"):
        limits = {"max_output_tokens": max_tokens, "ignore_eos": True, "store": False}
        return Ask(name, RESPONSES, body | limits | {"input": text})
    turns = [{"role": "user", "content": text}]
    return Ask(name, MESSAGES, body | {"max_tokens": max_tokens, "messages": turns})


CANARY = Ask("canary", COMPLETIONS, {
    "model": "quire-demo", "prompt": f"The capital of France, {SECRET}, is", "max_tokens": 24,
    "temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 1,
})  # fmt: skip


def culprit(kind: str) -> Ask:
    """A request that asks the core for a fault."""
    body = {"model": "quire-demo", "prompt": prompt(kind), "max_tokens": 16, "temperature": 0}
    return Ask(kind, COMPLETIONS, body | {"ignore_eos": True})


_NAMED = (
    "message", "message_start", "message_delta", "message_stop", "content_block_start",
    "content_block_delta", "content_block_stop", "response.created", "response.in_progress",
    "response.output_text.delta", "response.reasoning_text.delta", "response.completed",
    "response.function_call_arguments.delta", "response.incomplete", "response.failed",
)  # fmt: skip
"""Events that are looked at, and the type of a whole message."""
_LAST = tuple(
    f'{{"type":"{name}"'
    for name in ("message_stop", "response.completed", "response.incomplete", "response.failed")
)


def _is_last(data: str) -> bool:
    """Whether a stream has no event after this one."""
    return data == "[DONE]" or data.startswith(_LAST)


def _said(items: list[dict[str, Any]]) -> str:
    """The text of output items or content blocks."""
    texts = []
    for item in items:
        parts = item["content"] if isinstance(item.get("content"), list) else [item]
        for part in parts:
            texts.append(part.get("text") or part.get("arguments") or part.get("thinking") or "")
            texts.append(json.dumps(part["input"]) if "input" in part else "")
    return "".join(texts)


@dataclass
class Outcome:
    """What came of one request."""

    status: int = 0
    """Of HTTP; 0: the connection broke before."""
    choices: dict[int, list[Any]] = field(default_factory=dict)
    """Text, finish reason, stop reason and log-probabilities, by index."""
    usage: Any = None
    prompt_logprobs: Any = None
    error: Any = field(default=None)
    """The error object of the reply or the stream, or how the connection broke."""
    seed: int | None = field(default=None, compare=False)
    arrivals: list[float] = field(default_factory=list, compare=False)
    """Of the stream's events, in seconds of the monotonic clock."""
    retry_after: str | None = field(default=None, compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def is_whole(self) -> bool:
        """It ended as an answer does."""
        return (
            self.status == 200
            and self.error is None
            and bool(self.choices)
            and all(choice[1] for choice in self.choices.values())
        )

    def take(self, part: dict[str, Any]) -> None:
        """Add a chunk, an event, or the whole reply."""
        if part.get("error") or part.get("type") == "error":
            self.error = part.get("error") or part
        elif part.get("object") == "response" or part.get("type") in _NAMED:
            self._take_named(part)
            return
        if usage := part.get("usage"):
            # How much of a prompt was cached depends on others, and is no promise.
            self.usage = {k: v for k, v in usage.items() if k != "prompt_tokens_details"}
        self.seed = part.get("seed", self.seed)
        if part.get("prompt_logprobs") is not None:
            self.prompt_logprobs = part["prompt_logprobs"]
        for choice in part.get("choices", ()):
            told = self.choices.setdefault(choice["index"], ["", None, None, []])
            said = choice.get("delta") or choice.get("message") or choice
            told[0] += said.get("text") or said.get("content") or ""
            told[0] += said.get("reasoning") or ""
            for call in said.get("tool_calls") or ():
                function = call["function"]
                told[0] += (function.get("name") or "") + function["arguments"]
            told[1] = choice.get("finish_reason") or told[1]
            told[2] = choice.get("stop_reason") or told[2]
            if choice.get("seed") is not None and choice["index"] == 0:
                self.seed = choice["seed"]
            if choice.get("prompt_logprobs") is not None:
                self.prompt_logprobs = choice["prompt_logprobs"]
            if logprobs := choice.get("logprobs"):
                told[3].append(logprobs)

    def _take_named(self, part: dict[str, Any]) -> None:
        """Of Responses and Messages, an event or the whole reply. All items are one choice."""
        told = self.choices.setdefault(0, ["", None, None, []])
        delta = part.get("delta") or {}
        if isinstance(delta, str):
            told[0] += delta
        else:
            told[0] += delta.get("text") or delta.get("partial_json") or delta.get("thinking") or ""
            told[1] = delta.get("stop_reason") or told[1]
            told[2] = delta.get("stop_sequence") or told[2]
        whole = part.get("response", part)
        if part.get("object") == "response":
            told[0] = _said(whole["output"])
        elif part.get("type") == "message":
            told[:3] = _said(part["content"]), part["stop_reason"], part["stop_sequence"]
        if whole.get("status") in ("completed", "incomplete"):
            told[1] = whole["status"]
        if usage := whole.get("usage"):
            # How much of a prompt was cached depends on others, and is no promise.
            self.usage = {"output_tokens": usage["output_tokens"]}
        self.error = whole.get("error") or self.error

    def close(self) -> None:
        """Join what came in parts."""
        for told in self.choices.values():
            joined: dict[str, list[Any]] = {}
            for part in told[3]:
                for name, values in part.items():
                    joined.setdefault(name, []).extend(values or [])
            told[3] = joined


def client(url: str) -> httpx.AsyncClient:
    """One that waits for whoever is slow, and connects as often as it is asked to."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(600), limits=limits)


OnEvent = Callable[[], None]


async def run_one(http: httpx.AsyncClient, ask: Ask, on_event: OnEvent | None = None) -> Outcome:
    """One request, to its end."""
    out, start = Outcome(), time.monotonic()
    try:
        async with http.stream("POST", ask.path, json=ask.body) as reply:
            out.status, out.retry_after = reply.status_code, reply.headers.get("retry-after")
            if ask.body.get("stream") and reply.status_code == 200:
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        out.arrivals.append(time.monotonic())
                        out.take(json.loads(line[6:]))
                        if on_event is not None:
                            on_event()
            else:
                out.take(json.loads(await reply.aread()))
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        out.error = type(error).__name__
    out.close()
    out.seconds = time.monotonic() - start
    return out


async def run_resumable(http: httpx.AsyncClient, ask: Ask, seconds: float = 120) -> Outcome:
    """One streamed request to its end, by a client that comes back for the rest when it loses the
    server. An event counts once its id has come, which is what it comes back with."""
    out, last, stream, end = Outcome(), "", "", time.monotonic() + seconds
    method, path, body = "POST", ask.path, ask.body
    while time.monotonic() < end:
        headers = {"X-Resumable": "true"} | ({"Last-Event-ID": last} if last else {})
        try:
            async with http.stream(method, path, json=body, headers=headers) as reply:
                out.status = reply.status_code
                if reply.status_code != 200:
                    out.error = json.loads(await reply.aread())
                    if reply.status_code != 503:
                        break
                else:
                    out.error = None
                    stream, data = reply.headers["x-stream-id"], ""
                    async for line in reply.aiter_lines():
                        if line.startswith("data: "):
                            data = line[6:]
                        elif line.startswith("id: "):
                            last = line[4:]
                            if data != "[DONE]":
                                out.take(json.loads(data))
                            if _is_last(data):
                                out.close()
                                return out
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            out.error = type(error).__name__
        if stream:
            method, path, body = "GET", f"/v1/streams/{stream}", None
        await asyncio.sleep(0.1)
    out.close()
    return out


async def run_all(url: str, asks: Sequence[Ask], on_event: OnEvent | None = None) -> list[Outcome]:
    """All at once."""
    async with client(url) as http:
        return list(await asyncio.gather(*(run_one(http, ask, on_event) for ask in asks)))


async def references(url: str, asks: Sequence[Ask]) -> list[Outcome]:
    """The fault-free answers. A request without a seed has none: see `asked_again`."""
    return await run_all(url, asks)


def has_own_answer(ask: Ask) -> bool:
    """Whether the request alone determines the answer."""
    return ask.body["temperature"] == 0 or "seed" in ask.body


async def asked_again(url: str, asks: Sequence[Ask], outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The same requests with the seeds that the replies reported, one after the other."""
    async with client(url) as http:
        found = []
        for ask, out in zip(asks, outcomes, strict=True):
            body = {**ask.body, "seed": out.seed}
            found.append(await run_one(http, Ask(ask.name, ask.path, body)))
        return found


@dataclass
class Load:
    """Clients that ask one request after the other until they are told to stop.

    Args:
        url: Of the server.
        asks: Each client has one of them, and repeats it.
        expected: Fault-free answers, parallel to `asks`.
    """

    url: str
    asks: Sequence[Ask]
    expected: Sequence[Outcome]
    done: list[tuple[int, Outcome]] = field(default_factory=list)
    """Index into `asks`, and the outcome."""
    events: list[float] = field(default_factory=list)
    """When any stream brought something."""
    canaries: list[Outcome] = field(default_factory=list)
    stopping: bool = False
    resting: bool = False
    """Ask nothing for now."""
    canary_rests: bool = False
    rate: float | None = None
    """Requests per second that all clients together begin; `None`: each begins the next at once."""
    keeps_all: bool = True
    """Outcomes that are as expected are kept, and each event; else they are only counted."""
    num_right: int = 0
    """Outcomes that were as expected and are not in `done`."""
    _next: float = 0.0

    async def during(self, fault: Awaitable[Any]) -> Any:
        """Keep the load up while something is done to the server; returns what that returns."""
        async with client(self.url) as http:
            workers = [asyncio.create_task(self._work(http, i)) for i in range(len(self.asks))]
            workers.append(asyncio.create_task(self._watch(http)))
            try:
                return await fault
            finally:
                self.stopping = True
                await asyncio.gather(*workers)

    @property
    def num_done(self) -> int:
        """Outcomes so far."""
        return len(self.done) + self.num_right

    def _event(self) -> None:
        now = time.monotonic()
        if self.keeps_all or not self.events or now > self.events[-1] + 0.01:
            self.events.append(now)

    def _take(self, index: int, out: Outcome) -> None:
        ask = self.asks[index]
        is_right = out.is_whole and (not has_own_answer(ask) or out == self.expected[index])
        if is_right and not self.keeps_all and self.num_done % 100:
            self.num_right += 1
        else:
            self.done.append((index, out))

    async def _work(self, http: httpx.AsyncClient, index: int) -> None:
        while not self.stopping:
            if await self._rests():
                continue
            out = await run_one(http, self.asks[index], self._event)
            self._take(index, out)
            if out.error == "ConnectError":
                return  # nobody listens any more: one such outcome of each client is enough
            if out.status != 200:
                await asyncio.sleep(0.2)

    async def _watch(self, http: httpx.AsyncClient) -> None:
        while not self.stopping:
            if not self.canary_rests:
                self.canaries.append(await run_one(http, CANARY))
            await asyncio.sleep(0.02)

    async def _rests(self) -> bool:
        """Wait for the next turn; whether there is none now."""
        if self.resting:
            await asyncio.sleep(0.05)
        elif self.rate:
            now = time.monotonic()
            self._next = max(self._next, now - 1) + 1 / self.rate
            await asyncio.sleep(max(0.0, self._next - now))
        return self.resting or self.stopping
