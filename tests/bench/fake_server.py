"""A server without a model: it streams as told, hangs or dies as told. In a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from patience import PATIENCE


class FakeServer:
    """Answers `/v1/models` with `m`, and everything else with `tokens` chunks, `gap` seconds apart.

    Args:
        usage: Whether it tells token counts.
        hang_after: Requests after which it accepts, and never answers.
        break_after: Requests after which it closes the listening socket and every connection.
        status: Of replies, with an OpenAI error if it is not 200.
        cut: End streams without an end.
        loading: Times that it is asked for its models while it still loads, and answers 503.
        spread: Share by which gaps are longer or shorter. Those of the n-th request are the same in
            every server, and again after `bodies` was emptied.
        events: What is streamed instead of tokens and usage, before the end: values in JSON, or
            texts as they stand.
        whole: The body of replies, instead of a stream.
        metrics: The body of `/metrics`, which is missing otherwise.
    """

    def __init__(
        self, *, tokens: int = 4, gap: float = 0.0, usage: bool = True, status: int = 200,
        hang_after: int | None = None, break_after: int | None = None, cut: bool = False,
        loading: int = 0, spread: float = 0.0, events: Sequence[Any] | None = None,
        whole: str | None = None, metrics: str | None = None,
    ) -> None:  # fmt: skip
        self.tokens, self.gap, self.usage, self.status, self.cut = tokens, gap, usage, status, cut
        self.loading, self.spread = loading, spread
        self.events, self.whole, self.metrics = events, whole, metrics
        self.hang_after, self.break_after = hang_after, break_after
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.paths: list[str] = []
        self.open = self.most_open = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._started = threading.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._started.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._started.set()
        await self._end.wait()
        self._die()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _die(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    (int(line.split(":")[1]) for line in head.splitlines()
                     if line.lower().startswith("content-length")), 0,
                )  # fmt: skip
                body = await reader.readexactly(length)
                await self._answer(head, body, writer)
        self._writers.discard(writer)
        writer.transport.abort()

    async def _answer(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        path = head.split()[1]
        if path == "/tokenize":
            return self._whole(writer, "404 Not Found", "{}")
        if not body:
            known = path == "/v1/models"
            text = json.dumps({"data": [{"id": "m"}, {"id": "adapter"}]} if known else {})
            self.paths.append(path)
            if known and self.paths.count(path) <= self.loading:
                return self._whole(writer, "503 Service Unavailable", "{}")
            if path == "/metrics" and self.metrics is not None:
                return self._whole(writer, "200 OK", self.metrics)
            status = "200 OK" if known or path.endswith("_profile") else "404 Not Found"
            return self._whole(writer, status, text)
        self.bodies.append(json.loads(body))
        self.headers.append(head)
        if self.hang_after is not None and len(self.bodies) > self.hang_after:
            await asyncio.Event().wait()
        if self.break_after is not None and len(self.bodies) > self.break_after:
            return self._die()
        if self.status != 200:
            error = {"error": {"message": "the queue is full", "code": self.status}}
            return self._whole(writer, f"{self.status} No", json.dumps(error))
        if self.whole is not None:
            return self._whole(writer, "200 OK", self.whole)
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        await self._stream(writer, random.Random(len(self.bodies)))
        self.open -= 1

    def _whole(self, writer: asyncio.StreamWriter, status: str, text: str) -> None:
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())

    async def _stream(self, writer: asyncio.StreamWriter, rng: random.Random) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in self.events or ():
            self._event(writer, event)
        for i in range(self.tokens if self.events is None else 0):
            await asyncio.sleep(self.gap * (1 + self.spread * rng.uniform(-1, 1)))
            end = "length" if i + 1 == self.tokens and not self.cut else None
            self._event(writer, {"choices": [{"text": " a", "finish_reason": end}]})
        if self.usage and self.events is None:
            counts = {"prompt_tokens": 7, "completion_tokens": self.tokens}
            self._event(writer, {"choices": [], "usage": counts})
        if not self.cut:
            self._chunk(writer, b"data: [DONE]\n\n")
        self._chunk(writer, b"")

    def _event(self, writer: asyncio.StreamWriter, event: Any) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        self._chunk(writer, f"data: {text}\n\n".encode())

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextlib.contextmanager
def fake(**how: Any) -> Iterator[FakeServer]:
    """A server while the block runs."""
    with FakeServer(**how) as server:
        yield server
