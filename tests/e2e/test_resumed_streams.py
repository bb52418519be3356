"""Clients that lose their connections to a real server again and again, whose core is killed
meanwhile: they resume, and have the same bytes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

import httpx
import openai
import psutil

from asgi_caller import last_id
from live_server import Server, serving
from patience import PATIENCE
from test_core_killed import BODIES, fold, reference

LONG = ("completions", {"prompt": "Once", "seed": 11, "temperature": 1, "max_tokens": 900,
                        "min_tokens": 900, "logprobs": 1})  # fmt: skip
KEEP = {"X-Resumable": "true"}


class Client:
    """One request over connections that break after any number of bytes."""

    def __init__(self, url: str, path: str, body: dict[str, Any], rng: random.Random) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=PATIENCE)
        self.path = f"/v1/{path}"
        self.body = {"model": "quire-demo", "max_tokens": 300, "ignore_eos": True, "stream": True,
                     "stream_options": {"include_usage": True}, **body}  # fmt: skip
        self.stream_id = ""
        self.received = b""
        self.num_cuts = 0
        self._rng = rng

    async def run(self) -> None:
        """Until the end of the stream."""
        async with self.http:
            is_complete = await self._connect("POST", self.path, json=self.body, headers=KEEP)
            while not is_complete:
                self.num_cuts += 1
                last = last_id(self.received)
                if last and self._rng.random() < 0.3:
                    headers = {"Last-Event-ID": last}
                    more: Any = {"json": self.body, "headers": headers}
                    is_complete = await self._connect("POST", self.path, **more)
                else:
                    headers = {"Last-Event-ID": last} if last else {}
                    url = f"/v1/streams/{self.stream_id}"
                    is_complete = await self._connect("GET", url, headers=headers)

    async def _connect(self, method: str, url: str, **more: Any) -> bool:
        """One connection; whether it came to the end of the stream."""
        left, data = int(self._rng.expovariate(1 / 25_000)), b""
        async with self.http.stream(method, url, **more) as reply:
            assert reply.status_code == 200, await reply.aread()
            self.stream_id = reply.headers["x-stream-id"]
            async for piece in reply.aiter_raw():
                data += piece
                if len(data) >= left and b"[DONE]" not in data:
                    data = data[:left]
                    break
        self.received += data[: data.rfind(b"\n\n") + 2] if b"\n\n" in data else b""
        return b"data: [DONE]" in self.received

    def lines(self) -> list[str]:
        """Of all that came, as of a stream that never broke."""
        events = self.received.decode().splitlines()
        assert len(set(ids := [e for e in events if e.startswith("id: ")])) == len(ids)
        return [event for event in events if event.startswith("data: ")]


async def storm(server: Server, rng: random.Random, kills: bool) -> list[Client]:
    bodies = [(path, body) for path, body in (*BODIES, LONG) if body.get("stream", True)]
    clients = [Client(server.url, path, body, rng) for path, body in bodies]
    running = asyncio.gather(*(client.run() for client in clients))
    if kills:
        while sum(client.num_cuts for client in clients) < len(clients):
            await asyncio.sleep(0.01)
        (core,) = (c for c in psutil.Process(server.process.pid).children()
                   if "quire::EngineCore" in " ".join(c.cmdline()))  # fmt: skip
        os.kill(core.pid, signal.SIGKILL)
    await running
    return clients


def test_clients_resume_while_the_core_is_killed() -> None:
    rng = random.Random(1)
    with serving("--no-enable-prefix-caching") as server:
        wanted = [
            want
            for (_, body), want in zip(BODIES, asyncio.run(reference(server.url)), strict=True)
            if body.get("stream", True)
        ]
        for kills in (False, True):
            clients = asyncio.run(storm(server, rng, kills))
            for client, want in zip(clients, wanted, strict=False):
                assert fold(client.lines()) == want, (client.path, client.body)
            assert sum(client.num_cuts for client in clients) > len(clients)
            for client in clients:
                uncut = httpx.get(f"{server.url}/v1/streams/{client.stream_id}", timeout=PATIENCE)
                kept = b"".join(
                    event + b"\n\n"
                    for event in uncut.content.split(b"\n\n")
                    if event and not event.startswith(b":")
                )
                assert kept == client.received, client.body
        long = [client for client in clients if client.body["max_tokens"] == 900]
        assert fold(long[0].lines())[1]["completion_tokens"] == 900


def test_the_official_client_reads_streams_with_ids(server: Server) -> None:
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        texts = []
        for headers in ({}, KEEP, {"Idempotency-Key": "one"}, {"Idempotency-Key": "one"}):
            stream = client.chat.completions.create(
                model="quire-demo", messages=question, temperature=0, stream=True,
                extra_headers=headers,
            )  # fmt: skip
            chunks = list(stream)
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
            seen = chunks[0].id
        again = client.chat.completions.with_raw_response.create(
            model="quire-demo", messages=question, temperature=0, stream=True,
            extra_headers={"Idempotency-Key": "one"},
        )  # fmt: skip
        assert again.headers["idempotent-replayed"] == "true" and next(again.parse()).id == seen
    assert len(set(texts)) == 1 and "Paris" in texts[0]
