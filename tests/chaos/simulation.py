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
import gc
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

if __name__ == "__main__":
    TESTS = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(TESTS / name) for name in ("chaos", "engine", "support")]

import msgspec

from fake_executor import FakeExecutor
from known_streams import TOKENIZER, VOCABULARY, Caller, token
from quire.config import EngineConfig
from quire.core.batch import BatchResult, ScheduledBatch
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine import async_llm
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import EngineCore
from quire.engine.cores import wire
from quire.engine.cores.death import Death
from quire.engine.cores.handle import CoreHandle, OnExit, OnMessage
from quire.engine.cores.obey import obey_contained
from quire.engine.cores.parts import encode_outputs
from quire.engine.messages import AddRequests, Failure, FromCore, Outputs, Progress, Ready, ToCore
from quire.params import RequestOutputKind, SamplingParams
from quire.utils.timing import ManualClock

FROM_CORE = msgspec.msgpack.Decoder(FromCore)
TO_CORE = msgspec.msgpack.Decoder(ToCore)
KILLER = VOCABULARY[0] + 1
"""A prompt that begins with this token kills each core that works on its third output token."""
KILLS_AT = 2
MANY_CORES = 20
"""Each holds open files of /proc, which in a process of its own would end with it: after a schedule
with more they are collected."""
MOST_ACTS = 20_000
"""A schedule that needs more has stopped getting anywhere."""


class Killed(BaseException):
    """The process of the core is gone."""


class SeededExecutor(FakeExecutor):
    """Tokens are a function of prompt, position and seed; a step may raise, or kill its core.

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
        for name, (prompt, outputs, _) in self.known.items():
            if name in batch.num_scheduled_tokens and is_killed_by(prompt, len(outputs)):
                raise Killed
        kept = {name: (p, list(out), n) for name, (p, out, n) in self.known.items()}
        result = super().execute(batch)
        for name in batch.num_scheduled_tokens:
            prompt, outputs, _ = self.known[name]
            if name in result.sampled_token_ids and is_killed_by(prompt, len(outputs) - 1):
                raise Killed
        if self.raises:
            self.raises -= 1
            self.known = kept
            raise MemoryError("simulated")
        return result

    def token_of(self, request_id: str, prompt: list[int], num_outputs: int) -> int:
        return token(prompt, self.seeds[request_id], num_outputs)

    def reset(self) -> None:
        self.known.clear()


def is_killed_by(prompt: Sequence[int], position: int) -> bool:
    """Whether a core dies of computing this output of a prompt."""
    return prompt[0] == KILLER and position >= KILLS_AT


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
        self.killed = False
        """By a request."""
        self.handed: dict[str, tuple[str, int]] = {}
        """What it was sent: by internal id, the caller's name and which of the completions."""
        self._heard = 0
        # number of the last message without a gap before it
        self.told: set[str] = set()
        """Of these, those that it gave something."""
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
        if isinstance(message, AddRequests):
            self.handed.update({r.request_id: (r.external_id, r.index) for r in message.requests})
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
                message = TO_CORE.decode(self.inbox.popleft())
                reply = obey_contained(self.core, message, self._number)
                if reply is not None:
                    self._say(reply)
            elif self.core.has_requests:
                self._step(self.core)

    def _step(self, core: EngineCore) -> None:
        try:
            frames, unsent = core.step_into(self._frames)
        except Killed:
            self.killed = True
            self.die()
            return
        except MemoryError:
            if self._again:
                self.fail()
            self._again = True
            return
        assert not unsent, "an output cannot be sent"
        self._again = False
        self._number += len(frames)
        self.outbox += [frame[wire.HEADER :] for frame in frames]

    def _frames(
        self, outputs: list[EngineCoreOutput], stats: StepStats
    ) -> tuple[list[bytes], list[str]]:
        return encode_outputs(self.epoch, self._number, outputs, stats)

    def give(self) -> None:
        """Have the front end hear the next message, whether it still listens or not."""
        message = FROM_CORE.decode(self.outbox.popleft())
        if message.number == self._heard + 1:  # after a gap, nothing is taken from it any more
            self._heard = message.number
            if isinstance(message, Outputs):
                self.told.update(output.request_id for output in message.outputs)
        self._on_message(message)

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


@dataclass(frozen=True)
class Loss:
    """A core that was lost, as the front end's journal and this side's own notes have it."""

    open: frozenset[tuple[str, int]]
    """Completions that it had been sent and that had not ended."""
    silent: frozenset[tuple[str, int]]
    """Of these, those that it had given nothing."""
    has_worked: bool


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
        self.losses: list[Loss] = []
        rng = self.rng
        self._killers = rng.random() < 0.3
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
        if self.cores:
            self.losses.append(self._loss(self.core))
        self.cores.append(SimulatedCore(epoch, on_message, on_exit, self.clock, self._blocks))
        return self.cores[-1]

    def _loss(self, core: SimulatedCore) -> Loss:
        journal = self.engine.frontend.journal
        assert journal is not None
        left = {r.request_id for r in journal.replay()} & core.handed.keys()
        return Loss(
            frozenset(core.handed[name] for name in left),
            frozenset(core.handed[name] for name in left - core.told),
            core.core is not None,
        )

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
            caller.check(may_be_blamed=True)
            self._check_blame(caller)
        self.engine.check_integrity()
        assert self.engine.num_unfinished == 0, "the front end holds a request"
        self.core.check()
        await self.engine.shutdown()
        assert all(core.stopped and core.reaped for core in self.cores), "a core was left"

    @property
    def num_blamed(self) -> int:
        """Completions that ended with an error, and that no core died of."""
        innocent = [c for c in self.callers if c.prompt[0] != KILLER]
        return sum(len(caller.blamed()) for caller in innocent)

    @property
    def num_convicted(self) -> int:
        """Completions that ended with an error, and that cores died of."""
        return sum(len(c.blamed()) for c in self.callers if c.prompt[0] == KILLER)

    def _check_blame(self, caller: Caller) -> None:
        """Whoever kills cores gets no token from where it kills on. An innocent completion may be
        blamed only if two cores that had it were lost, one after the other, without giving it
        anything, and if nobody else was in the second one: then nothing that can be seen from
        outside tells it from a culprit."""
        for index in range(caller.params.n):
            tokens, where = caller.sent()[index], f"{caller.name}[{index}]"
            if caller.prompt[0] == KILLER:
                assert len(tokens) <= KILLS_AT, f"{where} outlived what kills it"
            elif index in caller.blamed():
                one = caller.name, index
                lost = [x for x in self.losses if one in x.open and x.has_worked]
                assert len(lost) >= 2, f"{where} was blamed for {len(lost)} deaths"
                assert one in lost[-1].silent & lost[-2].silent, f"{where} had got something"
                assert lost[-1].open == {one}, f"{where} was blamed, {lost[-1].open} were there"

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
        if self._killers and rng.random() < 0.2:
            stem = [KILLER, *stem]
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
    convicted: int = 0
    """Completions that cores died of, and that were taken out for it."""
    blamed: int = 0
    """Completions that were taken for the cause of deaths that came from outside."""
    killed: int = 0
    """Cores that a request killed."""
    acts: Counter[str] = field(default_factory=Counter)
    broken: dict[int, str] = field(default_factory=dict)
    """By seed, what did not hold."""


async def play(first: int, count: int) -> Played:
    """So many schedules, of the seeds from `first` on."""
    told = Played()
    with quiet():
        for seed in range(first, first + count):
            if await _play_one(seed, told) > MANY_CORES:
                gc.collect()
    return told


async def _play_one(seed: int, told: Played) -> int:
    """One schedule; how many cores it took."""
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
    told.convicted += simulation.num_convicted
    told.killed += sum(core.killed for core in simulation.cores)
    told.acts += simulation.acts
    told.tokens += sum(
        len(p.token_ids) for c in simulation.callers for o in c.got for p in o.outputs
    )
    return len(simulation.cores)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random schedules of deaths and lost messages.")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; default: 0")
    parser.add_argument("--schedules", type=int, default=1000, help="how many; default: 1000")
    args = parser.parse_args(argv)
    start = time.monotonic()
    told = asyncio.run(play(args.seed, args.schedules))
    print(
        f"{told.schedules} schedules in {time.monotonic() - start:.1f} s: {told.requests} requests,"
        f" {told.tokens} tokens, {told.deaths} cores replaced, {told.killed} of them killed by a"
        f" request; {told.convicted} culprits and {told.blamed} innocents blamed;"
        f" {dict(told.acts)}"
    )
    for seed, what in told.broken.items():
        print(f"seed {seed}: {what}")
    print(f"{len(told.broken)} schedules broke a condition")
    return int(bool(told.broken))


if __name__ == "__main__":
    sys.exit(main())
