"""Clients that break rules, over plain sockets: they vanish, never read or finish, send garbage.

They know HTTP and the paths of an OpenAI-compatible server, nothing of its inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from mixed_load import COMPLETIONS, Ask, client, run_one

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models",
    "/v1/embeddings", "/score", "/rerank", "/health", "/metrics", "/", "/limits", "/explain_prefix",
    "/v1/requests", "/nothing", "//v1/models", "/%2e%2e/v1/models",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 2**31, 2**63, 2**200, -(2**63) - 1, "", "x" * 5000, "\x00", "\ud800",
    [], {}, [[]], [None], {"a": {}}, [2**31], [-1], 1e308, -0.0,
)  # fmt: skip
FIELDS = (
    "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop",
    "logprobs", "top_logprobs", "prompt_logprobs", "logit_bias", "stream", "stream_options",
    "presence_penalty", "repetition_penalty", "min_p", "ignore_eos", "min_tokens", "bad_words",
    "allowed_token_ids", "stop_token_ids", "cache_salt", "priority", "user", "echo", "best_of",
    "truncate_prompt_tokens", "model", "response_format", "tools", "suffix", "deadline_ms",
)  # fmt: skip
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(url: str, **how: Any) -> Pair:
    """A socket to the server."""
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port, **how)


def post(path: str, body: bytes, headers: str = "") -> bytes:
    """A request as bytes."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body


def body_of(**fields: Any) -> bytes:
    """The body of a streamed completion of many tokens."""
    made = {"model": "quire-demo", "prompt": "Once upon a time", "max_tokens": 400, "stream": True}
    return json.dumps(made | {"ignore_eos": True, "temperature": 1} | fields).encode()


async def disconnect_storm(url: str, count: int, at_once: int = 48) -> int:
    """Requests whose clients vanish: before the body is whole, at once, or after some events."""
    gate, done = asyncio.Semaphore(at_once), 0

    async def one(index: int) -> None:
        nonlocal done
        rng = random.Random(index)
        async with gate:
            with contextlib.suppress(OSError):
                reader, writer = await connect(url)
                sent = post(COMPLETIONS, body_of(n=rng.choice([1, 1, 4]), seed=index))
                if rng.random() < 0.1:
                    sent = sent[: rng.randrange(len(sent))]
                writer.write(sent)
                await writer.drain()
                if rng.random() < 0.7:
                    with contextlib.suppress(TimeoutError):
                        wanted = rng.choice([1, 300, 3000])
                        await asyncio.wait_for(reader.read(wanted), rng.random())
                writer.transport.abort()
                done += 1

    await asyncio.gather(*(one(index) for index in range(count)))
    return done


@contextlib.asynccontextmanager
async def read_never(url: str, count: int) -> AsyncIterator[None]:
    """Streams with small windows that nobody reads."""
    pairs = []
    for index in range(count):
        pair = await connect(url, limit=1024)
        pair[0]._transport.pause_reading()  # type: ignore[attr-defined]
        pair[1].write(post(COMPLETIONS, body_of(seed=index, max_tokens=1000, logprobs=5)))
        pairs.append(pair)
    try:
        yield
    finally:
        for _, writer in pairs:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def partial_requests(url: str, count: int) -> AsyncIterator[None]:
    """Requests that begin and do not end: headers, bodies and chunks, a byte now and then."""
    heads = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-A: ",
        post(COMPLETIONS, b"x" * 1000)[:-990],
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n",
    )
    drips = (b"a", b"x", b"1\r\n \r\n")
    pairs = []
    for index in range(count):
        pair = await connect(url)
        pair[1].write(heads[index % 3])
        pairs.append(pair)

    async def drip() -> None:
        while True:
            await asyncio.sleep(0.02)
            for index, (_, writer) in enumerate(pairs):
                if not writer.transport.is_closing():
                    writer.write(drips[index % 3])

    dripping = asyncio.create_task(drip())
    try:
        yield
    finally:
        dripping.cancel()
        for _, writer in pairs:
            writer.transport.abort()


@dataclass
class Replies:
    """What came of bad requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    """Those with 5xx, or with no answer in time."""


async def malformed(url: str, count: int, seed: int = 7, at_once: int = 16) -> Replies:
    """Bad bytes and bad fields, each case a function of the seed and its number."""
    found, gate = Replies(), asyncio.Semaphore(at_once)

    async def one(index: int) -> None:
        rng = random.Random(seed * 10**9 + index)
        sent = _bad_http(rng) if rng.random() < 0.3 else _bad_json(rng)
        async with gate:
            status = await _status(url, sent)
        found.statuses[status] += 1
        if status >= 500 or status < 0:
            found.bad.append(f"case {index}: status {status} for {sent[:200]!r}")

    await asyncio.gather(*(one(index) for index in range(count)))
    return found


async def _status(url: str, sent: bytes) -> int:
    """Status of the reply; 0: the server closed the connection without one, -1: it hangs."""
    try:
        reader, writer = await connect(url)
        writer.write(sent)
        if writer.can_write_eof():
            writer.write_eof()
        line = await asyncio.wait_for(reader.readline(), 60)
        writer.transport.abort()
        return int(line.split()[1]) if line.startswith(b"HTTP/1.1 ") else 0
    except TimeoutError:
        return -1
    except (OSError, ValueError, IndexError):
        return 0


def _bad_json(rng: random.Random) -> bytes:
    path = rng.choice(PATHS)
    fields: dict[str, Any] = {"model": "quire-demo", "max_tokens": 2}
    if rng.random() < 0.7:
        fields["messages" if "chat" in path else "prompt"] = (
            [{"role": "user", "content": "a"}] if "chat" in path else "a"
        )
    for _ in range(rng.choice([1, 1, 2, 3])):
        fields[rng.choice(FIELDS)] = rng.choice(VALUES)
    text = json.dumps(fields).encode()
    match rng.randrange(6):
        case 0:
            text = text[: rng.randrange(len(text))]
        case 1:
            text = b"[" * rng.randrange(1, 5000)
        case 2:
            cut = rng.randrange(len(text))
            text = text[:cut] + bytes([rng.randrange(256)]) + text[cut + 1 :]
    return post(path, text, rng.choice(["", "", "X-Request-Id: a b\r\n", "Accept: x\r\n"]))


def _bad_http(rng: random.Random) -> bytes:
    good = post(rng.choice(PATHS), body_of(max_tokens=1))
    match rng.randrange(6):
        case 0:
            return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 200)))
        case 1:
            return good.replace(b"Content-Length: ", b"Content-Length: -", 1)
        case 2:
            return good.replace(b"Host: localhost", b"A" * rng.choice([10, 70000]), 1)
        case 3:
            return good.replace(b"POST", rng.choice([b"BREW", b"", b"G E T", b"OPTIONS"]), 1)
        case 4:
            return good.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 1)
        case _:
            at = rng.randrange(len(good))
            return good[:at] + bytes([rng.randrange(256)]) + good[at + 1 :]


IDS = (
    "same", "same", "../../etc/passwd", "a" * 128, "a" * 9000, "cmpl-same", "same-0", "0_same",
    "%00", "None", "'; drop table", "e\u0301", "1", "-1", "same,same",
)  # fmt: skip


async def send_ids(url: str, rounds: int) -> list[str]:
    """The same and strange ids and salts at once, each with an answer of its own; complaints."""
    found = []

    def asked(number: int) -> Ask:
        prompt = f"{number} + {number} ="
        body = {"model": "quire-demo", "prompt": prompt, "max_tokens": 12, "temperature": 0}
        return Ask(str(number), COMPLETIONS, body | {"ignore_eos": True})

    async with client(url) as http:
        asks = [asked(number) for number in range(len(IDS))]
        right = [await run_one(http, ask) for ask in asks]
        for _ in range(rounds):
            outs = await asyncio.gather(
                *(_with_id(url, ask, name) for ask, name in zip(asks, IDS, strict=True))
            )
            for name, out, expected in zip(IDS, outs, right, strict=True):
                if out is not None and out != expected.choices[0][0]:
                    found.append(f"id {name[:20]!r} got another answer")
    return found


async def _with_id(url: str, ask: Ask, name: str) -> str | None:
    """The text under an id and a salt; `None` if they were refused with 4xx."""
    headers = {"X-Request-Id": name.encode()}
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        body = {**ask.body, "cache_salt": name[:60]}
        reply = await http.post(ask.path, json=body, headers=headers)
    if 400 <= reply.status_code < 500:
        return None
    return str(reply.json()["choices"][0]["text"]) if reply.status_code == 200 else "no answer"
