"""Bad bytes and bad fields: cases made from a seed and a number, so each can be sent again.

A case is answered well if the reply is no 5xx, comes in time, and tells nothing of the server's
inside.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from quire.chaos.target import HttpReply, HttpTarget, exchange

PATHS: Final = (
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models",
    "/v1/embeddings", "/score", "/rerank", "/health", "/metrics", "/", "/limits", "/explain_prefix",
    "/v1/requests", "/nothing", "//v1/models", "/%2e%2e/v1/models",
)  # fmt: skip
VALUES: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1.5, 2**31, 2**63, 2**200, -(2**63) - 1, "", "x" * 5000, "\x00", "\ud800",
    [], {}, [[]], [None], {"a": {}}, [2**31], [-1], 1e308, -0.0,
)  # fmt: skip
FIELDS: Final = (
    "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop",
    "logprobs", "top_logprobs", "prompt_logprobs", "logit_bias", "stream", "stream_options",
    "presence_penalty", "repetition_penalty", "min_p", "ignore_eos", "min_tokens", "bad_words",
    "allowed_token_ids", "stop_token_ids", "cache_salt", "priority", "user", "echo", "best_of",
    "truncate_prompt_tokens", "model", "response_format", "tools", "suffix", "deadline_ms",
    "chat_template", "chat_template_kwargs", "prompt_embeds", "mm_processor_kwargs", "metadata",
    # names of engines' internal messages, which no request may reach
    "request_id", "internal_id", "epoch", "client_index", "kv_transfer_params", "block_ids",
)  # fmt: skip
INSIDE: Final = re.compile(
    rb"Traceback|File \\?\"|\b0x[0-9a-f]{8,}|/site-packages/|/home/|/usr/lib|/tmp/"
)
"""What no reply may hold: stacks, addresses, paths."""


@dataclass
class Replies:
    """What came of bad requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    """Those with 5xx, with no answer in time, or that tell of the server's inside."""

    def take(self, what: str, reply: HttpReply) -> None:
        """Count and judge one."""
        self.statuses[reply.status] += 1
        if reply.status >= 500 or reply.status < 0:
            self.bad.append(f"{what}: {'hangs' if reply.status < 0 else reply.status}")
        elif reply.status >= 400 and (found := INSIDE.search(reply.body)):
            self.bad.append(f"{what}: the reply holds {found.group()[:40]!r}")


Maker = Callable[[HttpTarget, random.Random], bytes]


async def malformed(
    target: HttpTarget, count: int, make: Maker | None = None, seed: int = 7, at_once: int = 16
) -> Replies:
    """Send cases and judge the replies.

    Args:
        make: `bad_http`, `bad_json`, or both if left out.
    """
    found, gate = Replies(), asyncio.Semaphore(at_once)

    async def one(index: int) -> None:
        rng = random.Random(seed * 10**9 + index)
        maker = make or (bad_http if rng.random() < 0.3 else bad_json)
        sent = maker(target, rng)
        async with gate:
            reply = await exchange(target, sent, half_close=True)
        found.take(f"case {index} {sent[:160]!r}", reply)

    await asyncio.gather(*(one(index) for index in range(count)))
    return found


def bad_json(target: HttpTarget, rng: random.Random) -> bytes:
    """Fields with values that do not belong there, or text that is no JSON."""
    path = rng.choice(PATHS)
    fields: dict[str, Any] = {"model": target.model, "max_tokens": 2}
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
    strange = rng.choice(["", "", "X-Request-Id: a b\r\n", "Accept: x\r\n"])
    return target.post(path, text, strange)


def bad_http(target: HttpTarget, rng: random.Random) -> bytes:
    """Bytes that are not quite HTTP."""
    body = json.dumps(target.ask_for_text("a", max_tokens=1)).encode()
    good = target.post(rng.choice(PATHS), body)
    match rng.randrange(7):
        case 0:
            return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 200)))
        case 1:
            return good.replace(b"Content-Length: ", b"Content-Length: -", 1)
        case 2:
            return good.replace(b"Host: ", b"A" * rng.choice([10, 70000]) + b": ", 1)
        case 3:
            return good.replace(b"POST", rng.choice([b"BREW", b"", b"G E T", b"OPTIONS"]), 1)
        case 4:
            return good.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 1)
        case 5:
            many = b"".join(b"X-%d: 1\r\n" % i for i in range(rng.choice([200, 9000])))
            return good.replace(b"\r\n\r\n", b"\r\n" + many + b"\r\n", 1)
        case _:
            at = rng.randrange(len(good))
            return good[:at] + bytes([rng.randrange(256)]) + good[at + 1 :]
