"""API process and engine core on a fake clock, with a queue of messages between them that fails.

Front end, supervisor, journal, scheduler, KV books and wire format are the real ones; only the
model is replaced, by one whose tokens are a function of (prompt, position, seed). A schedule is a
sequence of small acts drawn from a seeded generator: requests, aborts, changes of limits, messages
that are delivered, delayed, repeated, exchanged or lost, steps that raise, cores that die while
they load, work or reply. After each schedule: every request has ended, with exactly the tokens,
text and finish reason that its seed determines, and neither side holds anything.

    python tests/chaos/simulation.py --seed N --schedules M

plays M schedules from seed N on. A schedule that breaks something is named by its seed, and
`--seed THAT --schedules 1` plays the same again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

if __name__ == "__main__":
    TESTS = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(TESTS / name) for name in ("chaos", "engine", "support")]

import msgspec

from fake_executor import FakeExecutor
from quire.config import EngineConfig, ModelConfig
from quire.core.batch import BatchResult, ScheduledBatch
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine import async_llm
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import EngineCore
from quire.engine.cores import wire
from quire.engine.cores.death import Death
from quire.engine.cores.handle import CoreHandle, OnExit, OnMessage
from quire.engine.cores.obey import obey
from quire.engine.frontend.stream import RequestStream
from quire.engine.messages import Failure, FromCore, Outputs, Progress, Ready, ToCore
from quire.errors import QuireError
from quire.outputs import RequestOutput
from quire.params import RequestOutputKind, SamplingParams
from quire.tokenizer.tokenizer import Tokenizer
from quire.utils.timing import ManualClock

TOKENIZER = Tokenizer.from_folder(ModelConfig().tokenizer_folder, None)
VOCABULARY = TOKENIZER.encode(
    " one two three four five six seven eight nine ten", add_special_tokens=False
)
FROM_CORE = msgspec.msgpack.Decoder(FromCore)
TO_CORE = msgspec.msgpack.Decoder(ToCore)
MOST_ACTS = 6000
"""A schedule that needs more has stopped getting anywhere."""


def token(prompt: Sequence[int], seed: int | None, position: int) -> int:
    """What the model of the simulation generates."""
    return VOCABULARY[crc32(repr((list(prompt), seed, position)).encode()) % len(VOCABULARY)]


class SeededExecutor(FakeExecutor):
    """Tokens are a function of prompt, position and seed; a step may raise.

    Args:
        num_blocks: Of 16 tokens each. Few of them make preemptions.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(lambda prompt, position: 0, num_blocks=num_blocks, max_model_len=256)
        self.seeds: dict[str, int | None] = {}
        self.raises = 0

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        for new in batch.scheduled_new_reqs:
            assert new.sampling_params is not None
            self.seeds[new.req_id] = new.sampling_params.seed
        kept = {name: (p, list(out), n) for name, (p, out, n) in self.known.items()}
        result = super().execute(batch)
        if self.raises:
            self.raises -= 1
            self.known = kept
            raise MemoryError("simulated")
        return result

    def token_of(self, request_id: str, prompt: list[int], num_outputs: int) -> int:
        return token(prompt, self.seeds[request_id], num_outputs)

    def reset(self) -> None:
        self.known.clear()


class SimulatedCore:
    """A `CoreHandle` around a real `EngineCore`. Nothing happens by itself: what was sent lies as
    bytes in `inbox` until `take`, what the core says lies in `outbox` until `give`."""

    def __init__(
        self, epoch: int, on_message: OnMessage, on_exit: OnExit, clock: ManualClock, blocks: int
    ) -> None:
        self.epoch = epoch
        self.inbox: deque[bytes] = deque()
        self.outbox: deque[bytes] = deque()
        self.state = "new"
        """`new`, `loading`, `ready`, `failed` or `gone`."""
        self.stopped = self.reaped = False
        self.misses_words = False
        """Whether a message to it was lost."""
        self.executor = SeededExecutor(blocks)
        self.core: EngineCore | None = None
        self._on_message, self._on_exit, self._clock = on_message, on_exit, clock
        self._number = 1
        self._again = False

    def start(self, config: EngineConfig) -> None:
        assert self.state == "new", "a core is never started twice"
        self.state, self._config = "loading", EngineConfig.from_dict(_sent(config.to_dict()))

    def send(self, message: ToCore) -> None:
        assert message.epoch == self.epoch, "sent to the wrong core"
        if self.state != "gone":
            self.inbox.append(wire.encode(message)[wire.HEADER :])

    def prepare(self, message: ToCore) -> Callable[[], None]:
        return partial(self.send, message)

    def observe(self, closely: bool) -> None:
        pass

    def condemn(self) -> None:
        pass

    def stop(self) -> None:
        self.state, self.stopped = "gone", True

    async def ended(self, grace: float = 1.0) -> None:
        assert self.stopped, "it was not told to stop"
        self.reaped = True

    @property
    def is_busy(self) -> bool:
        """Whether it would do anything if it had its turn."""
        working = self.core is not None and (bool(self.inbox) or self.core.has_requests)
        return self.state == "loading" or (self.state == "ready" and working)

    def turn(self) -> None:
        """What a core process does next: load, take a message, or step."""
        if self.state == "loading" and self._number <= 2:
            self._say(Progress(self.epoch, self._number, "weights", self._number, 2))
        elif self.state == "loading":
            self.core = EngineCore(self._config, executor=self.executor, clock=self._clock)
            self.state = "ready"
            self._say(Ready(self.epoch, self._number, self.core.info.to_dict()))
        elif self.state == "ready":
            assert self.core is not None
            if self.inbox:
                reply = obey(self.core, TO_CORE.decode(self.inbox.popleft()), self._number)
                if reply is not None:
                    self._say(reply)
            elif self.core.has_requests:
                self._step(self.core)

    def _step(self, core: EngineCore) -> None:
        try:
            frame = core.step_into(self._frame)
        except MemoryError:
            if self._again:
                self.fail()
            self._again = True
            return
        self._again = False
        self._number += 1
        self.outbox.append(frame)

    def _frame(self, outputs: list[EngineCoreOutput], stats: StepStats) -> bytes:
        return wire.encode(Outputs(self.epoch, self._number, outputs, stats))[wire.HEADER :]

    def give(self) -> None:
        """Have the front end hear the next message, whether it still listens or not."""
        self._on_message(FROM_CORE.decode(self.outbox.popleft()))

    def fail(self) -> None:
        """Say that it cannot go on."""
        if self.state in ("loading", "ready"):
            self.state = "failed"
            self._say(Failure(self.epoch, self._number, "simulated", "EngineDead"))

    def die(self) -> None:
        """End as a process does that is killed. What it had said may still be heard, or not."""
        if self.state != "gone":
            self.state = "gone"
            self._on_exit(self, Death("killed by SIGKILL", "Simulated."))

    def check(self) -> None:
        """An idle core holds nothing."""
        if self.core is not None and self.state == "ready":
            self.core.scheduler.check_integrity()
            pool = self.core.kv.block_pool
            assert not self.core.scheduler.requests, "the core holds a request"
            assert pool.get_num_free_blocks() == pool.num_blocks - 1, "the core holds blocks"

    def _say(self, message: FromCore) -> None:
        self.outbox.append(wire.encode(message)[wire.HEADER :])
        self._number += 1


def _sent(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


@dataclass
class Caller:
    """One request, and what came of it."""

    name: str
    prompt: list[int]
    params: SamplingParams
    stream: RequestStream
    aborted: bool = False
    got: list[RequestOutput] = field(default_factory=list)
    error: QuireError | None = None

    @property
    def is_done(self) -> bool:
        return self.error is not None or bool(self.got and self.got[-1].finished)

    async def read(self) -> None:
        """Take the next output, if there is one."""
        if self.stream.unread():
            try:
                self.got.append(await anext(self.stream))
            except QuireError as error:
                self.error = error

    def check(self) -> None:
        """It has ended, with exactly what its seed determines."""
        assert self.error is None, f"{self.name} is lost: {self.error}"
        assert self.is_done, f"{self.name} has no end"
        for index in range(self.params.n):
            pieces = [p for o in self.got for p in o.outputs if p.index == index]
            tokens = [t for piece in pieces for t in piece.token_ids]
            text = "".join(piece.text for piece in pieces)
            expected = reference(self.prompt, self.params, self.stream.seed + index)
            if pieces[-1].finish_reason == "error":
                # Taken for the cause of deaths: see `Simulation._check_blame`.
                assert tokens == expected[0][: len(tokens)], f"{self.name}[{index}]"
            elif pieces[-1].finish_reason == "abort":
                assert self.aborted, f"{self.name}[{index}] was aborted by nobody"
                assert tokens == expected[0][: len(tokens)], f"{self.name}[{index}]"
            else:
                told = tokens, text, pieces[-1].finish_reason
                assert told == expected, f"{self.name}[{index}]: {told}, expected {expected}"


def reference(prompt: list[int], params: SamplingParams, seed: int) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason of one completion; it knows no cores."""
    tokens: list[int] = []
    for position in range(params.max_tokens or 0):
        tokens.append(token(prompt, seed, position))
        text = TOKENIZER.decode(tokens)
        for stop in params.stop or []:
            if stop in text:
                return tokens, text[: text.index(stop)], "stop"
    return tokens, TOKENIZER.decode(tokens), "length"


class Simulation:
    """One schedule.

    Args:
        seed: Everything that happens follows from it.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock(100.0)
        self.cores: list[SimulatedCore] = []
        self.callers: list[Caller] = []
        self.calls: list[asyncio.Task[Any]] = []
        self.acts: Counter[str] = Counter()
        rng = self.rng
        self.trouble = rng.choice([0.0, 0.02, 0.06, 0.15])
        self._blocks = rng.choice([18, 24, 100])
        self.engine = AsyncLLM(
            EngineConfig.from_options(
                disable_log_stats=True,
                record_steps=16,
                max_model_len=256,
                max_num_seqs=rng.choice([1, 2, 8]),
                max_num_batched_tokens=rng.choice([16, 64, 2048]),
                scheduling_policy=rng.choice(["fcfs", "priority", "fair"]),
            ),
            entropy=b"",
            clock=self.clock,
            make_core=self._make,
            replaces=lambda error: True,
        )
        self.engine.supervisor.start()

    def _make(self, epoch: int, on_message: OnMessage, on_exit: OnExit) -> CoreHandle:
        self.cores.append(SimulatedCore(epoch, on_message, on_exit, self.clock, self._blocks))
        return self.cores[-1]

    @property
    def core(self) -> SimulatedCore:
        """The one that is there."""
        return self.cores[-1]

    async def play(self) -> None:
        """The schedule, and what must hold after it.

        Raises:
            AssertionError: it does not.
        """
        for _ in range(self.rng.randrange(20, 200)):
            if self.rng.random() < self.trouble:
                self._hurt()
            else:
                await self._work()
            await self._settle()
        await self._finish()
        for caller in self.callers:
            caller.check()
        self._check_blame()
        self.engine.check_integrity()
        assert self.engine.num_unfinished == 0, "the front end holds a request"
        self.core.check()
        await self.engine.shutdown()
        assert all(core.stopped and core.reaped for core in self.cores), "a core was left"

    @property
    def num_blamed(self) -> int:
        """Completions that ended with an error."""
        ends = [p.finish_reason for c in self.callers for o in c.got for p in o.outputs]
        return ends.count("error")

    def _check_blame(self) -> None:
        """Deaths here come from outside, so whoever is blamed for them is innocent. That may only
        happen to one that two cores were lost with, the second one with nobody else in it."""
        assert 2 * self.num_blamed <= len(self.cores) - 1, "blamed without two deaths"

    async def _settle(self) -> None:
        self.clock.advance(0.001)
        for _ in range(3):
            await asyncio.sleep(0)
        self.engine.check_integrity()

    async def _work(self) -> None:
        rng, core = self.rng, self.core
        choice = rng.random()
        if choice < 0.08 and len(self.callers) < 12:
            await self._submit()
        elif choice < 0.11 and self.callers:
            caller = rng.choice(self.callers)
            caller.aborted = True
            await self.engine.abort(caller.name)
        elif choice < 0.13:
            limits = self.engine.set_limits(max_num_seqs=rng.randint(1, 6))
            self.calls.append(asyncio.ensure_future(limits))
        elif choice < 0.3 and self.callers:
            await rng.choice(self.callers).read()
        elif choice < 0.6 and core.outbox:
            core.give()
        else:
            core.turn()

    async def _submit(self) -> None:
        rng, name = self.rng, f"r{len(self.callers)}"
        stem = [VOCABULARY[0]] * rng.choice([0, 0, 16, 40])
        prompt = [*stem, *(rng.choice(VOCABULARY) for _ in range(rng.randint(1, 30)))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 30),
            n=rng.choice([1, 1, 1, 3]),
            stop=rng.choice([[], [], [" three"], [" four five"]]),
            seed=rng.choice([None, rng.randrange(50)]),
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        stream = await self.engine.submit(prompt, params, name)
        self.callers.append(Caller(name, prompt, params, stream))

    def _hurt(self) -> None:
        rng, core, old = self.rng, self.core, self.rng.choice(self.cores)
        match rng.randrange(9):
            case 0:
                self._count("died")
                core.die()
            case 1:
                self._count("failed")
                core.fail()
            case 2 if core.outbox:
                self._count("lost")
                del core.outbox[rng.randrange(len(core.outbox))]
            case 3 if core.outbox:
                self._count("repeated")
                core.outbox.append(rng.choice(core.outbox))
            case 4 if len(core.outbox) > 1:
                self._count("reordered")
                rng.shuffle(core.outbox)
            case 5 if core.inbox:
                self._count("lost on the way in")
                core.misses_words = True
                del core.inbox[rng.randrange(len(core.inbox))]
            case 6 if old is not core and old.outbox:
                self._count("said by a core that was replaced")
                old.give()
            case 7:
                self._count("step raised once")
                core.executor.raises = 1
            case 8:
                self._count("step raised twice")
                core.executor.raises = 2

    def _count(self, what: str) -> None:
        self.acts[what] += 1

    async def _finish(self) -> None:
        """Do all that is left to do. A core that has nothing to do while callers wait has lost
        something on its way in: it is ended, as a watchdog would."""
        for _ in range(MOST_ACTS):
            core = self.core
            if core.outbox:
                core.give()
            elif core.state == "loading" or (core.state == "ready" and core.inbox):
                core.turn()
            elif core.misses_words and core.is_busy:
                core.turn()  # it has not heard of an abort, and works on to the end
            elif not self.engine.num_unfinished and all(call.done() for call in self.calls):
                break  # what the core still works on now, it should not
            elif core.is_busy:
                core.turn()
            else:
                self._count("silent")
                core.die()
            await self._settle()
            for caller in self.callers:
                await caller.read()
        else:
            raise AssertionError("it never ends")
        for caller in self.callers:
            while caller.stream.unread():
                await caller.read()


@contextmanager
def quiet() -> Iterator[None]:
    """Without what cores and supervisors log of deaths, and without reading the tokenizer again
    for every engine."""
    load, level = async_llm.load_tokenizer, logging.root.manager.disable
    async_llm.load_tokenizer = lambda *_: TOKENIZER  # type: ignore[assignment]
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        async_llm.load_tokenizer = load
        logging.disable(level)


@dataclass
class Played:
    """What schedules amounted to."""

    schedules: int = 0
    requests: int = 0
    tokens: int = 0
    deaths: int = 0
    blamed: int = 0
    """Completions that were taken for the cause of deaths."""
    acts: Counter[str] = field(default_factory=Counter)
    broken: dict[int, str] = field(default_factory=dict)
    """By seed, what did not hold."""


async def play(first: int, count: int) -> Played:
    """So many schedules, of the seeds from `first` on."""
    told = Played()
    with quiet():
        for seed in range(first, first + count):
            simulation = Simulation(seed)
            try:
                await simulation.play()
            except Exception as error:
                told.broken[seed] = f"{type(error).__name__}: {error}"
            for call in simulation.calls:
                call.cancel()
            await asyncio.gather(*simulation.calls, return_exceptions=True)
            told.schedules += 1
            told.requests += len(simulation.callers)
            told.deaths += len(simulation.cores) - 1
            told.blamed += simulation.num_blamed
            told.acts += simulation.acts
            told.tokens += sum(
                len(p.token_ids) for c in simulation.callers for o in c.got for p in o.outputs
            )
    return told


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random schedules of deaths and lost messages.")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; default: 0")
    parser.add_argument("--schedules", type=int, default=1000, help="how many; default: 1000")
    args = parser.parse_args(argv)
    start = time.monotonic()
    told = asyncio.run(play(args.seed, args.schedules))
    print(
        f"{told.schedules} schedules in {time.monotonic() - start:.1f} s: {told.requests} requests,"
        f" {told.tokens} tokens, {told.deaths} cores replaced,"
        f" {told.blamed} blamed for it; {dict(told.acts)}"
    )
    for seed, what in told.broken.items():
        print(f"seed {seed}: {what}")
    print(f"{len(told.broken)} schedules broke a condition")
    return int(bool(told.broken))


if __name__ == "__main__":
    sys.exit(main())
