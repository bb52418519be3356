"""A million requests: does memory grow with the number that were served?

`python tests/chaos/soak.py --requests 1000000` drives the front end and the engine core, with the
wire format between them, in one process: everything of a request except HTTP and the model, whose
tokens a fake executor gives. `--http 50000` sends requests over HTTP to a server with the embedded
model. The exit code is 1 if resident memory grows by more than 1 kB per 1,000 requests.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    TESTS = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(TESTS / name) for name in ("chaos", "e2e", "engine", "support")]

import msgspec
import psutil

from fake_executor import FakeExecutor
from quire.config import EngineConfig
from quire.core.batch import BatchResult, ScheduledBatch
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import EngineCore
from quire.engine.cores import wire
from quire.engine.cores.handle import OnExit, OnMessage
from quire.engine.cores.obey import obey_contained
from quire.engine.cores.parts import encode_outputs
from quire.engine.messages import FromCore, Ready, ToCore
from quire.params import RequestOutputKind, SamplingParams

ALLOWED = 1.0
"""Bytes per request: 1 kB per 1,000."""
FROM_CORE = msgspec.msgpack.Decoder(FromCore)
TO_CORE = msgspec.msgpack.Decoder(ToCore)


class Tokens(FakeExecutor):
    """Gives any token, and keeps nothing of what it has done."""

    def __init__(self) -> None:
        super().__init__(
            lambda prompt, position: 300 + position % 9, num_blocks=400, max_model_len=256
        )

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        result = super().execute(batch)
        self.batches.clear()
        return result


class EncodedCore:
    """A `CoreHandle` in this process, whose messages are encoded both ways; `pump` runs it."""

    def __init__(self, epoch: int, on_message: OnMessage, on_exit: OnExit) -> None:
        self.epoch = epoch
        self.core: EngineCore
        self._inbox: deque[bytes] = deque()
        self._on_message = on_message
        self._number = 1

    def start(self, config: EngineConfig) -> None:
        self.core = EngineCore(config, executor=Tokens())
        told = Ready(self.epoch, self._number, self.core.info.to_dict())
        asyncio.get_running_loop().call_soon(self._hear, wire.encode(told))

    def send(self, message: ToCore) -> None:
        self._inbox.append(wire.encode(message)[wire.HEADER :])

    def prepare(self, message: ToCore) -> Callable[[], None]:
        return partial(self.send, message)

    def pump(self) -> bool:
        """Take what was sent and step once; whether there was anything to do."""
        busy = bool(self._inbox)
        while self._inbox:
            reply = obey_contained(self.core, TO_CORE.decode(self._inbox.popleft()), self._number)
            if reply is not None:
                self._hear(wire.encode(reply))
        if self.core.has_requests:
            self._frames: list[bytes] = []
            self.core.step_into(self._encode)
            for frame in self._frames:
                self._hear(frame)
            return True
        return busy

    def observe(self, closely: bool) -> None:
        """Nothing to see: who pumps it is this process."""

    def condemn(self) -> None:
        raise AssertionError("nobody watches it")

    def _encode(self, outputs: list[EngineCoreOutput], stats: StepStats) -> None:
        self._frames, failed = encode_outputs(self.epoch, self._number, outputs, stats)
        assert not failed

    def _hear(self, frame: bytes) -> None:
        self._on_message(FROM_CORE.decode(frame[wire.HEADER :]))
        self._number += 1

    def stop(self) -> None:
        self.core.shutdown()

    async def ended(self, grace: float = 1.0) -> None:
        pass


@dataclass
class Growth:
    """Resident memory over the number of requests served."""

    what: str
    served: list[int] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def note(self, served: int, rss: int) -> None:
        self.served.append(served)
        self.rss.append(rss)

    def slope(self) -> float:
        """Bytes per request: the median over all pairs of samples of the last two thirds (Theil and
        Sen). What is kept once (tables that fill) is there by then, and an arena that the allocator
        takes now and then weighs little."""
        skip = len(self.served) // 3
        points = list(zip(self.served[skip:], self.rss[skip:], strict=True))
        slopes = [
            (b[1] - a[1]) / (b[0] - a[0])
            for i, a in enumerate(points)
            for b in points[i + 1 :]
            if b[0] != a[0]
        ]
        return statistics.median(slopes) if slopes else 0.0

    def report(self) -> dict[str, Any]:
        return asdict(self) | {"bytes_per_request": self.slope(), "grows": self.grows}

    @property
    def grows(self) -> bool:
        """Beyond what is allowed."""
        return self.slope() > ALLOWED


async def in_process(requests: int, at_once: int = 64, samples: int = 100) -> Growth:
    """Front end and core."""
    growth, own = Growth("front end and core"), psutil.Process()
    cores: list[EncodedCore] = []

    def make(epoch: int, on_message: OnMessage, on_exit: OnExit) -> EncodedCore:
        cores.append(EncodedCore(epoch, on_message, on_exit))
        return cores[-1]

    config = EngineConfig.from_options(max_model_len=256, max_num_seqs=at_once)
    engine = AsyncLLM(config, entropy=b"", make_core=make)
    engine.supervisor.start()
    await engine.wait_ready()
    given, done, start = 0, 0, time.monotonic()
    ended = asyncio.Event()

    async def caller(number: int) -> None:
        nonlocal given, done
        rng = random.Random(number)
        while given < requests:
            given += 1
            name = f"r{given}"
            prompt = [rng.randrange(300, 2000) for _ in range(rng.randrange(1, 40))]
            params = SamplingParams(
                max_tokens=rng.randrange(1, 5), n=rng.choice((1, 1, 1, 2)), ignore_eos=True,
                seed=rng.choice((None, given)), output_kind=RequestOutputKind.DELTA,
                stop=rng.choice(([], ["zzz"])),
            )  # fmt: skip
            stream = await engine.submit(prompt, params, name, cache_salt=rng.choice((None, name)))
            aborts = rng.random() < 0.1
            async for _ in stream:
                if aborts:
                    break
            await stream.aclose()
            done += 1
            if done % max(1, requests // samples) == 0:
                gc.collect()
                growth.note(done, own.memory_info().rss)

    async def pump() -> None:
        while not ended.is_set():
            cores[-1].pump()
            await asyncio.sleep(0)

    pumping = asyncio.create_task(pump())
    callers = asyncio.gather(*(caller(number) for number in range(at_once)))
    await asyncio.wait((pumping, callers), return_when=asyncio.FIRST_COMPLETED)
    if pumping.done():
        callers.cancel()
        pumping.result()  # it raised
    await callers
    while engine.num_unfinished or cores[-1].core.has_requests:
        await asyncio.sleep(0)
    engine.check_integrity()
    cores[-1].core.scheduler.check_integrity()
    ended.set()
    await pumping
    await engine.shutdown()
    growth.seconds = time.monotonic() - start
    return growth


async def over_http(requests: int, at_once: int = 32, samples: int = 50) -> Growth:
    """A whole server: the resident memory of all its processes."""
    from chaos_server import chaos_server
    from quire.chaos.target import HttpTarget, ask

    growth, given, done = Growth("server over HTTP"), 0, 0
    start = time.monotonic()
    few = ("--num-gpu-blocks-override", "200", "--max-model-len", "512")
    with chaos_server(*few) as server:
        target = HttpTarget(server.url, "quire-demo")

        async def caller(number: int) -> None:
            nonlocal given, done
            rng = random.Random(number)
            while given < requests:
                given += 1
                body = target.ask_for_text(
                    f"{rng.random()} and {given}", max_tokens=rng.randrange(1, 3),
                    temperature=rng.choice((0, 1)), user=f"u{given}", stream=rng.random() < 0.5,
                    cache_salt=rng.choice((None, f"s{given}")),
                )  # fmt: skip
                reply = await ask(target, body, headers=f"X-Request-Id: id{given}\r\n")
                assert reply.is_answer, (reply.status, reply.body[:200])
                done += 1
                if done % max(1, requests // samples) == 0:
                    growth.note(done, round(server.held().rss_mib * 2**20))

        await asyncio.gather(*(caller(number) for number in range(at_once)))
        assert server.wait_quiet() and server.integrity() is not None
    growth.seconds = time.monotonic() - start
    return growth


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Memory over very many requests.")
    parser.add_argument("--requests", type=int, default=1_000_000, help="without HTTP")
    parser.add_argument("--http", type=int, default=50_000, help="over HTTP")
    parser.add_argument("--json", type=Path, help="write the measurements to this file, too")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    found = []
    for count, run in ((args.requests, in_process), (args.http, over_http)):
        if count:
            growth = asyncio.run(run(count))
            found.append(growth.report())
            first, last = growth.rss[len(growth.rss) // 3], growth.rss[-1]
            print(
                f"{growth.what}: {count} requests in {growth.seconds:.0f} s; RSS"
                f" {first / 2**20:.1f} MiB after a third of them, {last / 2**20:.1f} at the end;"
                f" {growth.slope():.3f} kB per 1,000 requests"
                f"{': it grows' if growth.grows else ''}",
                flush=True,
            )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found), "utf-8")
    return int(any(one["grows"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
