"""A server over sockets whose event loop is watched, with a vocabulary of the size people use.

Gate, journal, queues, the messages to the core, the output processor and the way garbage is
collected are the real ones; the core computes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

import quire
import vocabularies
from patience import PATIENCE
from quire.config import EngineConfig, ServerConfig
from quire.core.batch import TokenLogprobs
from quire.core.output import EngineCoreOutput
from quire.engine.async_llm import AsyncLLM
from quire.engine.cores import wire
from quire.engine.cores.parts import encode_outputs, encode_to_core
from quire.engine.messages import EngineCoreRequest, FromCore
from quire.outputs import FinishReason
from quire.serving.app import build_app
from quire.serving.http_server import http_server
from quire.serving.listener import bind
from quire.serving.server import _loop_factory
from quire.serving.server_state import ServerState
from quire.utils.collector import PacedCollection, keep_present
from silent_core import SilentCore

VOCAB_SIZE = 151_936
TICK = 0.002
"""Seconds between two looks at the clock."""
DEMO = Path(quire.__file__).parent / "assets" / "quire-demo"


def large_model(folder: Path, context: int) -> Path:
    """A model folder without weights, of a large vocabulary."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(vocabularies.large_tokenizer(VOCAB_SIZE))
    return folder


class CountingCore(SilentCore):
    """Encodes what it is sent as a core in a process of its own would need it, and scores prompts
    where that is asked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._in_turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def prepare(self, message: Any) -> Callable[[], None]:
        encode_to_core(message)
        return partial(self.send, message)

    def _end(self, requests: list[EngineCoreRequest]) -> None:
        if any(r.sampling_params.prompt_logprobs is not None for r in requests):
            task = asyncio.ensure_future(self._score(requests))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            super()._end(requests)

    async def _score(self, requests: list[EngineCoreRequest]) -> None:
        """Frames made in another process, which are read here as the real ones are."""
        asked = [(r.request_id, r.prompt_token_ids, r.sampling_params) for r in requests]
        plain = [(i, ids, p.prompt_logprobs, p.logprobs) for i, ids, p in asked]
        loop = asyncio.get_running_loop()
        async with self._in_turn:  # messages are numbered
            made = partial(_frames, self.epoch, self._number, plain)
            frames = await loop.run_in_executor(_pool(), made)
            self._number += len(frames)
            for frame in frames:
                self._on_message(_DECODER.decode(memoryview(frame)[wire.HEADER :]))
                await asyncio.sleep(0)


@cache
def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"))


_DECODER: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
Asked = tuple[str, list[int], int | None, int | None]


def _frames(epoch: int, number: int, asked: list[Asked]) -> list[bytes]:
    outputs = []
    for request_id, ids, count, own in asked:
        scored = None if count is None else [None, *(_scores(token, count) for token in ids[1:])]
        last = None if own is None else [_scores(5, own)]
        done = EngineCoreOutput(request_id, [5], last, scored, FinishReason.LENGTH)
        outputs.append(done)
    return encode_outputs(epoch, number + 1, outputs, None)[0]


def _scores(token: int, more: int) -> TokenLogprobs:
    others = [(token + 1 + i) % VOCAB_SIZE for i in range(more)]
    return TokenLogprobs([token, *others], [-0.5 - i for i in range(more + 1)], 1)


class WatchedServer:
    """A server in a thread, and the longest time that its event loop did nothing else.

    Time is CPU time of the loop's thread, so what other programs take does not count. `held` is the
    same in CPU time of the process: what another thread does while it holds the interpreter counts
    like work of the loop, but so does what it does meanwhile without holding it.
    """

    def __init__(self, model: Path) -> None:
        self._model = model
        self._worst = self.held = 0.0
        self._ready = threading.Event()
        self._stop: Callable[[], None] = lambda: None
        self.port = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self._ready.wait(PATIENCE)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        config = EngineConfig.from_options(model=str(self._model))
        engine = AsyncLLM(config, entropy=b"fixed", make_core=CountingCore)
        engine.supervisor.start()
        engine.supervisor.state = "ready"
        keep_present()
        settings = ServerConfig(port=0)
        listener = bind(settings)
        self.port = listener.getsockname()[1]
        state = ServerState(settings, engine)
        server = http_server(build_app(state), state.unread)
        self._stop = lambda: setattr(server, "should_exit", True)
        collecting = asyncio.ensure_future(PacedCollection(lambda: state.answering > 0).run())
        ticking = asyncio.ensure_future(self._tick())
        serving = asyncio.ensure_future(server.serve([listener]))
        await server.accepting()
        self._ready.set()
        await serving
        ticking.cancel()
        collecting.cancel()
        await engine.shutdown()

    async def _tick(self) -> None:
        while True:
            before, process = time.thread_time(), time.process_time()
            await asyncio.sleep(TICK)
            self._worst = max(self._worst, time.thread_time() - before)
            self.held = max(self.held, time.process_time() - process)

    def send(self, raw: bytes) -> tuple[int, bytes, float]:
        """Status, body and the longest block while a request was answered."""
        time.sleep(4 * TICK)
        self._worst = self.held = 0.0
        data = bytearray()
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as connection:
            with contextlib.suppress(ConnectionError):  # it may refuse before all is sent
                connection.sendall(raw)
            with contextlib.suppress(ConnectionError):
                while more := connection.recv(1 << 20):
                    data += more
        time.sleep(4 * TICK)
        head, _, body = bytes(data).partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), body, self._worst

    def post(self, path: str, body: bytes, *headers: str) -> tuple[int, bytes, float]:
        """The same for a body."""
        lines = [
            f"POST {path} HTTP/1.1",
            "host: localhost",
            "connection: close",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *headers,
        ]
        return self.send("\r\n".join([*lines, "", ""]).encode() + body)

    def stop(self) -> None:
        self._stop()
        self.thread.join(PATIENCE)
