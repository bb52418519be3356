"""What it costs, without any fault, to be able to replace a core: CPU time per step, in per cent.

The journal (tokens written down), the heartbeat (a step is announced in the shared page) and the
watchdog's learning are on and off in turns (A B B A) while one engine generates: the code of the
core's process and that of the API process in one process, with the frames between them, over the
embedded model. HTTP is not counted, which would only make the share smaller. The watchdog's looks,
five a second, are timed on a core of its own.

    python benchmarks/recovery_cost.py [--pairs 400]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
from paired import interval

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import EngineCore
from quire.engine.cores.core_process import EngineCoreProcess
from quire.engine.cores.process_handle import CoreProcess
from quire.engine.cores.watchdog import LOOK_SECONDS, Watchdog
from quire.engine.messages import FromCore, Ready, ToCore
from quire.params import RequestOutputKind, SamplingParams
from quire.utils.timing import RealClock

BLOCKS = {1: 100, 16: 20, 64: 10}
"""Steps between two changes, by the number of requests."""


class LocalCore:
    """A `CoreHandle` whose process is this one; its caller steps."""

    def __init__(self, epoch: int, on_message: Any, on_exit: Any) -> None:
        self.epoch = epoch
        self._on_message = on_message
        self._ours, theirs = socket.socketpair()
        self.process = EngineCoreProcess(theirs)
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._to_core = msgspec.msgpack.Decoder(ToCore)

    def start(self, config: EngineConfig) -> None:
        self.core = EngineCore(config, announce=self.process._announce)
        self.process.epoch = self.epoch
        self.process._send(Ready(self.epoch, 1, self.core.info.to_dict()))
        asyncio.get_running_loop().call_soon(self.pump)

    def prepare(self, message: ToCore) -> Callable[[], None]:
        frame = msgspec.msgpack.encode(message)
        return lambda: self.process._handle(self.core, self._to_core.decode(frame))

    def send(self, message: ToCore) -> None:
        self.prepare(message)()

    def pump(self) -> None:
        while not self.process._outbox.empty():
            frame = self.process._outbox.get()
            assert frame is not None
            self._on_message(self._decoder.decode(frame[4:]))

    def step(self) -> None:
        self.process._step(self.core)
        self.pump()

    def observe(self, closely: bool) -> None:
        pass

    def stop(self) -> None:
        self.core.shutdown()

    async def ended(self, grace: float = 1.0) -> None:
        self._ours.close()
        self.process._sock.close()


async def share(running: int, pairs: int) -> str:
    """How much more a step costs with all of it."""
    made: list[LocalCore] = []

    def make(*about: Any) -> LocalCore:
        made.append(LocalCore(*about))
        return made[-1]

    engine = AsyncLLM(EngineConfig.from_options(max_num_seqs=running), entropy=b"", make_core=make)
    engine.supervisor.start()
    await engine.wait_ready()
    core, journal, dog = made[0], engine.frontend.journal, engine.supervisor._watchdog
    announce = core.core._announce
    assert journal is not None
    params = SamplingParams(max_tokens=1900, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def refill() -> None:
        while len(engine._streams) < running:
            name = f"r{random.random()}"
            prompt = {"prompt_token_ids": [random.randrange(300, 900) for _ in range(20)]}
            stream = await engine.submit(prompt, params, name)
            tasks.append(asyncio.create_task(read(stream)))

    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    record = journal.record

    def switch(on: bool) -> None:
        core.core._announce = announce if on else None
        dog.record = Watchdog.record.__get__(dog) if on else lambda stats: None  # type: ignore[method-assign]
        journal.record = record if on else lambda outputs: None  # type: ignore[method-assign]

    tasks: list[asyncio.Task[None]] = []
    ratios, costs = [], []
    gc.disable()
    for pair in range(pairs):
        spent = {}
        for on in (True, False)[:: 1 if pair % 2 else -1]:
            switch(True)
            await refill()
            core.step()
            await asyncio.sleep(0)
            switch(on)
            times = []
            for _ in range(BLOCKS[running]):
                begun = time.process_time()
                core.step()
                times.append(time.process_time() - begun)
            spent[on] = statistics.median(times)
            await asyncio.sleep(0)
        ratios.append(100 * (spent[True] / spent[False] - 1))
        costs.append(1e6 * spent[False])
        gc.collect()
    for task in tasks:
        task.cancel()
    low, high = interval(ratios)
    cost, more = statistics.median(costs), statistics.median(ratios)
    await engine.shutdown()
    return f"{running:3} running: {cost:8.0f} us a step, {more:+.2f} % [{low:+.2f}, {high:+.2f}]"


def parts(running: int) -> str:
    """The same work alone, in microseconds of a step; the median of many."""
    from quire.core.batch import ScheduledBatch, ScheduledCachedRequests
    from quire.core.output import EngineCoreOutput
    from quire.core.stats import StepStats
    from quire.engine.cores.pulse import Activity, Pulse
    from quire.engine.frontend.journal import Journal
    from quire.engine.messages import EngineCoreRequest

    names = [f"r{i}" for i in range(running)]
    cached = ScheduledCachedRequests(names, [()] * running, [200] * running)
    batch = ScheduledBatch(1, [], cached, dict.fromkeys(names, 1), running, [], [])
    pulse, dog, journal = Pulse(), Watchdog(2.0, RealClock()), Journal()
    stats = StepStats(num_scheduled_tokens=running, num_scheduled_requests=running)
    stats.num_attended_tokens, stats.step_seconds = running * 200, 0.001
    params = SamplingParams()
    journal.open(EngineCoreRequest(n, n, 0, [1], params, 0.0) for n in names)
    outputs = [EngineCoreOutput(n, [5]) for n in names]

    def beat() -> None:
        pulse.begin(Activity.STEP, running, running, batch.num_attended_tokens, 1, 1)

    def each(act: Callable[[], Any]) -> float:
        times = []
        for _ in range(50):
            begun = time.process_time()
            for _ in range(100):
                act()
            times.append((time.process_time() - begun) / 100)
        return 1e6 * statistics.median(times)

    told = (each(beat), each(lambda: dog.record(stats)), each(lambda: journal.record(outputs)))
    pulse.close()
    return "heartbeat {:.2f}, watchdog {:.2f}, journal {:.2f} us a step".format(*told)


async def looks() -> str:
    """The looks at a core process of its own, as a share of one processor."""
    handle = CoreProcess(1, lambda message: None, lambda *about: None)
    handle.start(EngineConfig.from_options())
    dog, costs = Watchdog(2.0, RealClock()), []
    for _ in range(300):
        begun = time.process_time()
        seen = handle.observe(closely=False)
        assert seen is not None
        dog.look(seen, 0)
        costs.append(time.process_time() - begun)
    handle.stop()
    await handle.ended()
    cost = statistics.median(costs)
    return f"a look: {1e6 * cost:.0f} us, {100 * cost / LOOK_SECONDS:.3f} % of one processor"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40, help="turns of on and off")
    pairs = parser.parse_args().pairs
    for running in BLOCKS:
        print(asyncio.run(share(running, pairs)), "|", parts(running), flush=True)
    print(asyncio.run(looks()))
