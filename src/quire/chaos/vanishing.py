"""Clients that vanish, never read, or never finish what they send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator

from quire.chaos.target import HttpReply, HttpTarget, Pair, exchange


async def disconnect_storm(target: HttpTarget, count: int, at_once: int = 48) -> int:
    """Requests whose clients vanish: before the body is whole, at once, or after some events.

    Returns:
        How many connections were made.
    """
    gate, done = asyncio.Semaphore(at_once), 0

    async def one(index: int) -> None:
        nonlocal done
        rng = random.Random(index)
        async with gate:
            with contextlib.suppress(OSError):
                reader, writer = await target.connect()
                sent = target.long_stream(n=rng.choice([1, 1, 4]), seed=index)
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
async def read_never(target: HttpTarget, count: int, max_tokens: int = 1000) -> AsyncIterator[int]:
    """Streams with small windows that nobody reads; gives how many there are."""
    pairs: list[Pair] = []
    for index in range(count):
        with contextlib.suppress(OSError):
            pair = await target.connect(limit=1024)
            pair[0]._transport.pause_reading()  # type: ignore[attr-defined]
            pair[1].write(target.long_stream(seed=index, max_tokens=max_tokens))
            pairs.append(pair)
    try:
        yield len(pairs)
    finally:
        _drop(pairs)


@contextlib.asynccontextmanager
async def partial_requests(target: HttpTarget, count: int) -> AsyncIterator[int]:
    """Requests that begin and do not end: headers, bodies and chunks, a byte now and then."""
    heads = (
        target.head("POST", target.route) + b"X-A: ",
        target.post(target.route, b"x" * 1000)[:-990],
        target.head("POST", target.route, "Transfer-Encoding: chunked\r\n") + b"\r\n",
    )
    drips = (b"a", b"x", b"1\r\n \r\n")
    pairs: list[Pair] = []
    for index in range(count):
        with contextlib.suppress(OSError):
            pair = await target.connect()
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
        yield len(pairs)
    finally:
        dripping.cancel()
        _drop(pairs)


async def byte_by_byte(target: HttpTarget, padding: int = 20_000) -> HttpReply:
    """A good request in HTTP chunks of one byte each.

    Args:
        padding: Spaces after the JSON, each a chunk of its own.
    """
    body = target.ask_for_text("Once upon a time", max_tokens=2, temperature=0)
    text = json.dumps(body).encode() + b" " * padding
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    headers = "Transfer-Encoding: chunked\r\nConnection: close\r\n"
    return await exchange(target, target.head("POST", target.route, headers) + b"\r\n" + chunks)


def _drop(pairs: list[Pair]) -> None:
    for _, writer in pairs:
        writer.transport.abort()
