"""Requests that are well formed and hostile: ids that collide, numbers without measure, fields that
reached into other requests or ended whole engines in servers before.

Each row of `CASES` is an attack that is known from a published advisory, named by what it hits. An
answer may be anything but a 5xx or silence; what counts beside that is that a bystander notices
nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from quire.chaos.malformed import Replies
from quire.chaos.target import HttpReply, HttpTarget, ask, exchange

IDS: Final = (
    "same", "same", "../../etc/passwd", "a" * 128, "a" * 9000, "cmpl-same", "same-0", "0_same",
    "%00", "None", "'; drop table", "e\u0301", "1", "-1", "same,same",
)  # fmt: skip
HUGE: Final = (-1, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 10**30)
"""Ids that no array of a model holds, or that wrap around in one."""

Fields = dict[str, Any]


def _token_ids() -> Iterator[Fields]:
    """Each field that holds token ids: what is written to a row of logits by it must be in it."""
    for token in HUGE:
        yield {"allowed_token_ids": [token]}
        yield {"stop_token_ids": [token]}
        yield {"logit_bias": {str(token): 100}}
        yield {"prompt": [token]}
    for size in (2000, 2047, 2048, 2049, 32000, 50257, 128256, 151936):
        for token in (size - 1, size, size + 1):
            yield {"allowed_token_ids": [token]}
            yield {"logit_bias": {str(token): -100}}


def _counts() -> Iterator[Fields]:
    """Numbers that ask for memory before any limit is looked at."""
    names = "n best_of logprobs top_logprobs prompt_logprobs top_k max_tokens min_tokens"
    for name in (*names.split(), "truncate_prompt_tokens", "seed", "priority"):
        for value in (2**31, 10**9, -1, 1.5, True, 2**63, "1", 10**30):
            yield {name: value}


def _sizes() -> Iterator[Fields]:
    """Lists and texts without measure."""
    yield {"stop": ["x" * 100 + str(i) for i in range(10_000)]}
    yield {"stop": ["x" * 100_000]}
    yield {"bad_words": ["y" * 1000] * 2000}
    yield {"logit_bias": {str(i): 1 for i in range(200_000)}}
    yield {"prompt": ["a"] * 100_000}
    yield {"prompt": "word " * 400_000}
    yield {"prompt": [1] * 500_000}
    yield {"messages": [{"role": "user", "content": "a"}] * 50_000}
    yield {"allowed_token_ids": list(range(200_000))}


def _edges() -> Iterator[Fields]:
    """Prompts of no token, and of odd ones."""
    prompts: list[Any] = ["", " ", "\x00", "\ufeff", "a", [], [0], [1], [[]], [""], [[], []]]
    for prompt in prompts:
        yield {"prompt": prompt}
    contents: list[Any] = ["", None, [], [{"type": "text", "text": ""}], [{"type": "image_url"}]]
    for content in contents:
        yield {"messages": [{"role": "user", "content": content}]}


def _texts() -> Iterator[Fields]:
    """Free text that ends in cache keys, logs and hashes."""
    for name in ("cache_salt", "user", "request_id", "model", "suffix", "safety_identifier"):
        values: list[Any] = [
            "\x00",
            "\ud800",
            "a" * 1_000_000,
            "../../x",
            "\r\nX: y",
            "\u202e",
            7,
            [],
        ]
        for value in values:
            yield {name: value}


def _templates() -> Iterator[Fields]:
    """Templates of the caller's own, which loop or grow without end."""
    loop = "{% for i in range(10**12) %}x{% endfor %}"
    said = {"messages": [{"role": "user", "content": "a"}]}
    for fields in ({"chat_template": loop}, {"chat_template_kwargs": {"chat_template": loop}},
                   {"chat_template": "{{ ''.__class__.__mro__ }}"},
                   {"chat_template": "{{ 'a' * 10**10 }}"},
                   {"chat_template_kwargs": {f"k{i}": i for i in range(5000)}},
                   {"chat_template_kwargs": {"tools": loop, "tokenize": True}}):  # fmt: skip
        yield {**said, **fields}


def _inside() -> Iterator[Fields]:
    """Names of engines' own messages and handles."""
    names = "kv_transfer_params block_ids shm_name epoch data_parallel_rank prompt_embeds mm_kwargs"
    more = "multi_modal_data vllm_xargs logits_processors lora_request handle __class__"
    for name in f"{names} {more}".split():
        for value in ({"shm": "psm_1"}, "gASVAA==", [2**63], True):
            yield {name: value}


def _mixtures() -> Iterator[Fields]:
    """Penalties, bans, choices and log-probabilities together."""
    penalties = {"repetition_penalty": 2.0, "presence_penalty": -2.0, "frequency_penalty": 2.0}
    for n in (1, 3):
        for logprobs in (None, 0, 5):
            for echo in (False, True):
                yield {**penalties, "n": n, "logprobs": logprobs, "echo": echo, "min_tokens": 2,
                       "temperature": 2, "top_p": 1e-9, "top_k": 1, "min_p": 1.0}  # fmt: skip


CASES: Final[dict[str, tuple[str, Callable[[], Iterator[Fields]]]]] = {
    "token-ids": ("token ids outside the vocabulary", _token_ids),
    "counts": ("counts without measure", _counts),
    "sizes": ("lists and texts without measure", _sizes),
    "empty-prompts": ("prompts without tokens", _edges),
    "odd-texts": ("odd text in free fields", _texts),
    "templates": ("templates of the caller's own", _templates),
    "internal-names": ("names of internal messages as fields", _inside),
    "mixtures": ("all sampling parameters together", _mixtures),
}
"""By name: what it sends, in words and as fields."""


async def send_hostile(target: HttpTarget, name: str, at_once: int = 8) -> Replies:
    """Every request of one row of `CASES`."""
    found, gate = Replies(), asyncio.Semaphore(at_once)

    async def one(index: int, fields: Fields) -> None:
        base = target.ask_for_text("a", max_tokens=2)
        if "prompt" in fields or "messages" in fields:
            base = {"model": target.model, "max_tokens": 2}
        chat = "messages" in fields or (target.route.endswith("chat/completions"))
        path = "/v1/chat/completions" if chat and "prompt" not in fields else "/v1/completions"
        sent = target.post(path, json.dumps(base | fields).encode(), "Connection: close\r\n")
        async with gate:
            # A number without measure may be cut to the context's length, and that be generated.
            reply = await exchange(target, sent, 300)
        found.take(f"{name}, case {index} {str(fields)[:120]}", reply)

    await asyncio.gather(*(one(i, fields) for i, fields in enumerate(CASES[name][1]())))
    return found


async def distinct_values(target: HttpTarget, count: int, at_once: int = 16) -> Replies:
    """Requests of which each has other values in its free fields: nothing may be kept per value."""
    found, gate = Replies(), asyncio.Semaphore(at_once)

    async def one(index: int) -> None:
        value = f"v{index}" + "x" * 40
        fields = {"user": value, "cache_salt": value, "seed": index, "max_tokens": 1}
        async with gate:
            reply = await ask(
                target, target.ask_for_text("a", **fields), headers=f"X-Request-Id: {value}\r\n"
            )
        found.take(f"distinct values, case {index}", reply)

    await asyncio.gather(*(one(index) for index in range(count)))
    return found


async def endless_body(target: HttpTarget, most: int = 2**28) -> tuple[int, int]:
    """A body in chunks that does not end.

    Returns:
        The status of the reply, as `HttpReply` has it, and the bytes that the server took.
    """
    reader, writer = await target.connect()
    head = target.head("POST", target.route, "Transfer-Encoding: chunked\r\n")
    writer.write(head + b"\r\n")
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    sent, answer = 0, asyncio.ensure_future(reader.readline())
    try:
        while sent < most and not answer.done():
            writer.write(chunk)
            await asyncio.wait_for(writer.drain(), 60)
            sent += 65536
            await asyncio.sleep(0)
        line = await asyncio.wait_for(answer, 60)
        return (int(line.split()[1]) if line.startswith(b"HTTP/1.") else 0), sent
    except TimeoutError:
        return -1, sent
    except (OSError, ValueError, IndexError):
        return 0, sent
    finally:
        answer.cancel()
        writer.transport.abort()


async def send_ids(target: HttpTarget, rounds: int) -> list[str]:
    """The same and strange ids and salts at once, each with an answer of its own; complaints."""
    found: list[str] = []

    def asked(number: int) -> Fields:
        return target.ask_for_text(f"{number} + {number} =", max_tokens=12, temperature=0)

    async def under(number: int, name: str) -> HttpReply:
        body = asked(number) | {"cache_salt": name[:60]}
        return await ask(target, body, headers=f"X-Request-Id: {name}\r\n")

    right = [(await ask(target, asked(number))).text for number in range(len(IDS))]
    for _ in range(rounds):
        replies = await asyncio.gather(*(under(i, name) for i, name in enumerate(IDS)))
        for name, reply, expected in zip(IDS, replies, right, strict=True):
            if reply.status == 200 and reply.text != expected:
                found.append(f"id {name[:20]!r} got another answer")
            elif reply.status >= 500 or reply.status <= 0:
                found.append(f"id {name[:20]!r} ended with status {reply.status}")
    return found
