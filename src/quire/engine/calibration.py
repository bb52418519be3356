"""Measures how long steps take on this machine, as a server has them.

The engine core runs in a process of its own, and this process reads what its requests get while the
next step runs, as an API process does: that takes processor time from the steps, more from short
ones and from those with many requests, so it has to be in what is fitted. Three kinds of load take
turns: rounds of requests that all come at once (each with another number of requests, length of
prompts and token budget, so that every term of the model is seen alone), users who come and go
(so that prompts and decodes share steps), and single requests after pauses, which make everything
slower. Knows no files but the recording that it reads the steps from.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Container, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, replace
from pathlib import Path
from statistics import fmean, median
from typing import Final, NamedTuple

from quire.config import EngineConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.facts import FactKind, unpack
from quire.engine.async_llm import AsyncLLM
from quire.params import RequestOutputKind, SamplingParams
from quire.sim.lockstep import Lockstep, Replayed, SimulatedEngine, measured_overheads, rising
from quire.sim.measured_pace import measured_spells
from quire.sim.scenario import pool_of, recorded_config
from quire.sim.step_time import Overheads, StepTimeModel, fit
from quire.utils.collector import PacedCollection, keep_present
from quire.workload.trace import Trace, read_trace

ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS: Final = (8, 64, 256, 1024, 4096)
BUDGETS: Final = (32, 128, 256, 512, 2048)
DECODES: Final = 20
"""Tokens that each request of a round gets."""
SETTLED: Final = 8
"""Decodes of a round after a prompt that do not count. A round finds caches full of another one's
work, and for some steps its decodes take up to 1.5 times as long as those of an engine that has
been decoding all the while."""
SHARE: Final = 0.15
"""Of all the time so far, that one round or visit may take at most. Long ones have many requests
with long prompts together."""
LEAST_SHARE: Final = 0.5
"""Seconds that a round or visit may take anyway, of a short run."""
FIRST: Final = 8
"""Rounds that run in the order of their size, before it is known what larger ones cost."""
USERS: Final = (1, 2, 4, 8, 16, 32)
"""Users of the other half of the time."""
PROMPTS: Final = (8, 1024)
"""Between which the prompts of a visit are, as often short as long."""
ALIKE: Final = 2.0
"""The prompts of a visit are up to so many times longer or shorter than the length drawn for it."""
OUTPUTS: Final = (8, 64)
"""Tokens that users ask for."""
LEAST_VISIT: Final = 0.3
"""Seconds that a number of users stay at once, at least; after that they get what they asked
for."""
PAUSES: Final = 0.15
"""Of the time, that goes to pauses and the requests that end them."""
PAUSE: Final = (0.01, 2.0)
"""Seconds between which pauses are, as often short as long."""
AFTER_PAUSE: Final = (8, 256)
"""Between which the prompts after pauses are."""

QUIET: Final = 0.1
"""Seconds before and after a run without any request, which tell it from what others ask for."""

LONGEST_WAY: Final = 5.0
"""A way to or from the engine counts as at most so many times what is usual of its kind."""
LEAST_OF_USERS: Final = 20
"""Requests of users that tell the ways to and from the engine; with fewer, those of rounds count
too. Requests that come together wait for each other on both, longer than usual traffic does."""

Told = Callable[[str, float], None]
"""Called with what is going on, and the share that is done."""


class Round(NamedTuple):
    """Requests that come together."""

    rows: int
    context: int
    """Tokens of each prompt, at most."""
    budget: int
    """`max_num_batched_tokens`, at least."""

    @property
    def tokens(self) -> int:
        """All that it computes, at most."""
        return self.rows * (self.context + DECODES)


WARM_UP: Final = Round(2, 8, 32)
WARM_UPS: Final = 2


def rounds(max_num_seqs: int, max_model_len: int, kv_tokens: int, budget: int) -> list[Round]:
    """The rounds that fit, the smallest first."""
    contexts = [c for c in CONTEXTS if c + DECODES < max_model_len]
    made = [
        Round(rows, context, min(chunk, budget))
        for rows, context, chunk in itertools.product(ROWS, contexts, BUDGETS)
        if rows <= min(max_num_seqs, chunk) and rows * (context + DECODES + 128) < kv_tokens
    ]
    return sorted(dict.fromkeys(made), key=lambda r: (r.tokens, r.budget))


@asynccontextmanager
async def recorded_engine(config: EngineConfig, path: Path) -> AsyncIterator[AsyncLLM]:
    """An engine that records into a file, ready.

    Meanwhile this process collects garbage as a server does: a collection of everything takes tens
    of milliseconds, and would look like a slow engine.

    Raises:
        StartupError: it cannot start.
    """
    observed = replace(config.observability, record=str(path))
    llm = await AsyncLLM.start(replace(config, observability=observed))
    try:
        await llm.wait_ready()
        keep_present()
        collection = asyncio.ensure_future(PacedCollection(lambda: True).run())
        try:
            yield llm
        finally:
            collection.cancel()
    finally:
        await llm.shutdown()


class Calibration:
    """Measures one engine.

    Args:
        config: As given by the user, with the model on this machine.
        seconds: For the load, warm-up included.
        tell: Hears how far it is.

    Raises:
        StartupError: the engine cannot start.
    """

    def __init__(self, config: EngineConfig, seconds: float, tell: Told) -> None:
        self._config, self._seconds, self._tell = config, seconds, tell

    def run(self) -> StepTimeModel:
        """Measure, and fit a model."""
        return self.fitted([asyncio.run(self.measure())])

    async def measure(self) -> Measured:
        """Measure once."""
        async with self.engine() as engine:
            await engine.run()
        return engine.measured

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Measuring]:
        """An engine that measures as often as it is told to. When it has ended, all that it
        recorded is read."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.jsonl"
            async with recorded_engine(self._config, path) as llm:
                measuring = self.of(llm, path)
                yield measuring
            measuring.read()

    def of(self, llm: AsyncLLM, path: Path) -> Measuring:
        """Measure this engine, which may do other work between measurements, but none before the
        first.

        Args:
            llm: Ready, of this configuration.
            path: Of what it records.
        """
        resolved, _ = self._config.resolve(self._config.model.read_shape())
        load = CalibrationLoad(llm, resolved.scheduler, self._seconds, self._tell)
        return Measuring(load, path)

    def fitted(self, several: Sequence[Measured]) -> StepTimeModel:
        """A model of all that was measured, at several times."""
        steps = [step for measured in several for step in measured.warm()]
        shapes, seconds = [s.shape for s in steps], [s.recorded.seconds for s in steps]
        trace, overheads = several[0].trace, _mean([each.overheads() for each in several])
        about = {
            "source": "quire calibrate",
            "model": self._config.model.names[0],
            "device": trace.header.info["place"],
            "dtype": trace.header.info["dtype"],
            "steps": len(steps),
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        model = fit(shapes, seconds, overheads, about)
        errors = (abs(model.seconds(s) / took - 1) for s, took in zip(shapes, seconds, strict=True))
        model.about["median_error"] = round(median(errors), 4)
        paces = (measured_spells(each.warm(), model).values() for each in several)
        return replace(model, spells=tuple(itertools.chain(*paces)), _table=[])


class CalibrationLoad:
    """What a calibration asks of an engine.

    Args:
        llm: Ready.
        limits: Of its scheduler.
        seconds: For everything.
        tell: Hears how far it is.
    """

    def __init__(self, llm: AsyncLLM, limits: SchedulerConfig, seconds: float, tell: Told) -> None:
        self._llm, self._limits, self._seconds, self._tell = llm, limits, seconds, tell
        self._rng = random.Random(0)
        self._vocabulary, self._longest = llm.info["vocab_size"], llm.info["max_model_len"]
        self._token = float("inf")
        # seconds per token, of the round that was cheapest so far
        waiting = rounds(
            limits.max_num_seqs,
            self._longest,
            llm.info["num_blocks"] * llm.info["block_size"],
            limits.max_num_batched_tokens,
        )
        # Of all runs, so that short ones get to all of them together.
        self._waiting, self._visited = self._again_and_again(waiting), itertools.cycle(USERS)
        self._in_rounds = self._in_visits = self._in_pauses = 0.0
        self.sent: list[float] = []
        self.first: dict[int, float] = {}
        self.rounds: list[tuple[float, float]] = []
        self.runs: list[tuple[float, float]] = []
        # when requests were sent, when their first tokens came, and when rounds and whole runs
        # began and ended, by this process' clock

    async def run(self) -> None:
        """Rounds and visits in turns until the time is over; each kind of round once at least, but
        for those that take too long."""
        await asyncio.sleep(QUIET)
        started = time.monotonic()
        await self._all()
        self.runs.append((started, time.monotonic()))
        await asyncio.sleep(QUIET)

    async def _all(self) -> None:
        for _ in range(WARM_UPS):  # weights are read from disk, buffers are made
            await self._round(WARM_UP)
        started, earlier = time.monotonic(), sum(end - begin for begin, end in self.runs)
        while (spent := time.monotonic() - started) < self._seconds:
            one, done = next(self._waiting), min(0.94, spent / self._seconds)
            # Of short runs, later ones have long rounds and visits, too.
            share = SHARE * max(self._seconds, earlier + spent)
            most = max(LEAST_SHARE, min(self._seconds, share))
            if self._token * one.tokens <= most:
                self._tell(f"{one.rows} x {one.context} tokens", done)
                self._in_rounds += await self._round(one)
            if self._in_visits < self._in_rounds:
                users = next(self._visited)
                self._tell(f"{users} users", done)
                self._in_visits += await self._visit(users, most)
            if self._in_pauses < PAUSES * (earlier + spent):
                self._in_pauses += await self._pause()
        self._tell("what was measured", 0.95)

    def _again_and_again(self, waiting: list[Round]) -> Iterator[Round]:
        """The smallest rounds, which tell what others will cost; then all, each time in another
        order, so that what else the machine does falls on all kinds alike."""
        yield from waiting[:FIRST]
        while True:
            yield from self._rng.sample(waiting, len(waiting))

    async def _round(self, one: Round) -> float:
        """Requests that come together; returns how long they took. Their prompts have down to half
        as many tokens, and steps up to twice as many: kernels are quickest with sizes like 64."""
        limits = self._limits
        # A budget below the number of requests that may run is refused.
        least = max(one.budget, limits.max_num_seqs)
        budget = min(limits.max_num_batched_tokens, round(least * self._between(1, 2)))
        await self._llm.set_limits(max_num_batched_tokens=budget)
        length = max(2, round(one.context / self._between(1, 2)))
        started = time.monotonic()
        await asyncio.gather(*(self._ask(length, DECODES) for _ in range(one.rows)))
        took = time.monotonic() - started
        self.rounds.append((started, started + took))
        self._token = min(self._token, took / (one.rows * (length + DECODES)))
        return took

    async def _visit(self, users: int, longest: float) -> float:
        """Users who come and go, for up to so many seconds; returns how long it took."""
        await self._llm.set_limits(max_num_batched_tokens=self._limits.max_num_batched_tokens)
        stay = self._between(LEAST_VISIT, longest)
        # What all ask for at once is done soon after that.
        most = min(self._longest // 2, max(2 * PROMPTS[0], int(stay / self._token / users)))
        middle = self._between(*PROMPTS)
        low, high = (min(most, max(2, middle * times)) for times in (1 / ALIKE, ALIKE))
        started = time.monotonic()
        await asyncio.gather(*(self._user(started + stay, low, high) for _ in range(users)))
        return time.monotonic() - started

    async def _user(self, until: float, low: float, high: float) -> None:
        """Asks, waits up to as long as the answer took, and asks again. Prompts have so many tokens
        at least and at most."""
        await asyncio.sleep(self._rng.random() * (until - time.monotonic()) / 4)
        while time.monotonic() < until:
            started = time.monotonic()
            length = round(self._between(low, high))
            await self._ask(length, self._rng.randint(*OUTPUTS))
            await asyncio.sleep(self._rng.random() * (time.monotonic() - started))

    async def _pause(self) -> float:
        """A request after a pause; returns how long both took."""
        started = time.monotonic()
        shortest, longest = PAUSE
        most = max(2 * shortest, min(longest, PAUSES * self._seconds))
        await asyncio.sleep(self._between(shortest, most))
        length = self._between(*AFTER_PAUSE)
        await self._ask(round(min(length, self._longest / 2)), OUTPUTS[0])
        return time.monotonic() - started

    def _between(self, low: float, high: float) -> float:
        """As often near the one as near the other."""
        return math.exp(self._rng.uniform(math.log(low), math.log(high)))

    async def _ask(self, length: int, tokens: int) -> None:
        # At once: while it is made, nobody gets a token.
        prompt = self._rng.choices(range(self._vocabulary), k=length)
        params = SamplingParams(
            max_tokens=min(tokens, self._longest - length),
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        number = len(self.sent)
        self.sent.append(time.monotonic())
        async for _ in self._llm.generate(prompt, params, f"calibration-{number}"):
            self.first.setdefault(number, time.monotonic())


class Measuring:
    """An engine that is being measured.

    Args:
        load: For it.
        path: Of what it records.
    """

    def __init__(self, load: CalibrationLoad, path: Path) -> None:
        self._load, self._path = load, path
        self.measured: Measured
        # all that was recorded when it was read last

    @property
    def spans(self) -> list[tuple[float, float]]:
        """When each run began and ended, in seconds of what was read."""
        origin = clock_origin(self._load, self.measured.trace)
        return [(begin - origin, end - origin) for begin, end in self._load.runs]

    @property
    def asked(self) -> int:
        """Requests so far."""
        return len(self._load.sent)

    async def run(self) -> None:
        """Put the load on it, once more."""
        await self._load.run()

    def read(self) -> None:
        """Read what it has recorded."""
        trace = read_trace(self._path)
        recorded = recorded_config(trace.header.config)
        engine = SimulatedEngine(trace, recorded, pool_of(trace.header.info))
        self.measured = of_load(self._load, trace, list(Lockstep(trace, engine)))


class Measured(NamedTuple):
    """What came of a load."""

    load: CalibrationLoad
    trace: Trace
    replayed: list[Replayed]

    def warm(self) -> list[Replayed]:
        """The steps with something in them, without those that warm the engine up, and without the
        first decodes of rounds."""
        arrivals = sorted(request.arrival for request in self.trace.requests)
        warm = arrivals[WARM_UPS * WARM_UP.rows]
        origin = clock_origin(self.load, self.trace)
        begun = [start - origin for start, _ in self.load.rounds]
        ended = [end - origin for _, end in self.load.rounds]
        steps, decodes = [], 0
        for step in self.replayed:
            if not step.shape.tokens:
                continue
            start = step.recorded.start
            decodes = 0 if step.shape.prefills else decodes + 1
            last = bisect.bisect_right(begun, start) - 1
            in_round = last >= 0 and start < ended[last]
            if start >= warm and not (in_round and 0 < decodes <= SETTLED):
                steps.append(step)
        return steps

    def overheads(self) -> Overheads:
        """What passed beside the steps."""
        users = self._of_users()
        output, per_row, per_idle = delivery(self.load, self.trace, self.replayed, users)
        arrival, wake, wake_per_idle = ways_in(self.trace, self.replayed, users)
        return replace(
            measured_overheads(self.replayed),
            arrival=arrival,
            wake=wake,
            wake_per_idle=wake_per_idle,
            output=output,
            output_per_row=per_row,
            output_per_idle=per_idle,
        )

    def _of_users(self) -> set[int]:
        """The numbers of users' requests; of all requests, if users had few."""
        origin = clock_origin(self.load, self.trace)
        spans = [(begin - origin, end - origin) for begin, end in self.load.rounds]
        users = {
            request.number
            for request in self.trace.requests
            if not any(begin <= request.arrival <= end for begin, end in spans)
        }
        if len(users) >= LEAST_OF_USERS:
            return users
        return {request.number for request in self.trace.requests}


def of_load(load: CalibrationLoad, trace: Trace, replayed: list[Replayed]) -> Measured:
    """Without what others asked of the engine between the runs of the load."""
    origin = clock_origin(load, trace)

    def within(at: float) -> bool:
        return any(begin - QUIET / 2 < at + origin < end + QUIET / 2 for begin, end in load.runs)

    mine = [step for step in replayed if within(step.recorded.start)]
    requests = [request for request in trace.requests if within(request.arrival)]
    return Measured(load, replace(trace, requests=requests), mine)


def _mean(several: Sequence[Overheads]) -> Overheads:
    rows = zip(*(astuple(each) for each in several), strict=True)
    return Overheads(*map(fmean, rows))


def clock_origin(load: CalibrationLoad, trace: Trace) -> float:
    """From the trace's clock to that of the load: the first request was sent when the trace says
    that it came."""
    return min(load.sent) - min(request.arrival for request in trace.requests)


def delivery(
    load: CalibrationLoad, trace: Trace, steps: list[Replayed], numbers: Container[int]
) -> tuple[float, float, float]:
    """Seconds from the end of the step that made a first token until its caller had it, and how
    many more for each request of the step and for what was forgotten before it. Of means, because
    that of times to first token is asked for. Only requests of these numbers count."""
    origin = clock_origin(load, trace)
    made = _first_tokens(trace, steps)
    in_order = sorted(trace.requests, key=lambda request: request.arrival)
    after = [
        (
            (step.shape.rows, step.shape.idle),
            at - origin - step.recorded.start - step.recorded.seconds,
        )
        for number, at in load.first.items()
        if (step := made.get(in_order[number].number)) is not None
        and in_order[number].number in numbers
    ]
    if not after:
        return 0.0, 0.0, 0.0
    output, per_row, per_idle = rising(after, LONGEST_WAY)
    return output, per_row, per_idle


def _first_tokens(trace: Trace, steps: list[Replayed]) -> dict[int, Replayed]:
    """By number of the request: the step that computed the last of its prompt."""
    lengths = {request.number: request.prompt_len for request in trace.requests}
    made: dict[int, Replayed] = {}
    for step in steps:
        for fact in unpack(step.recorded.facts):
            computes = fact.kind in (FactKind.ADMITTED, FactKind.CHUNK)
            if computes and fact.a + fact.b >= lengths.get(fact.request, math.inf):
                made.setdefault(fact.request, step)
    return made


def ways_in(
    trace: Trace, steps: list[Replayed], numbers: Container[int]
) -> tuple[float, float, float]:
    """Seconds from a request's arrival at a busy engine until the scheduler could take it, and how
    many more until the step of one that comes to an idle engine begins: at once, and for what was
    forgotten meanwhile. Only requests of these numbers count.

    When a busy engine got a request is not recorded, only with which step. The way is that for
    which the fewest requests come with another step than they did.
    """
    came = {r.number: r.arrival for r in trace.requests if r.number in numbers}
    starts = [step.recorded.start for step in steps]
    idle: list[tuple[tuple[float], float]] = []
    busy: list[tuple[float, bool]] = []  # seconds until the next step, and whether it was in time
    was_busy = False
    for number, step in enumerate(steps):
        queued = [f.request for f in unpack(step.recorded.facts) if f.kind == FactKind.QUEUED]
        arrivals = [came[request] for request in queued if request in came]
        if was_busy:
            for arrival in arrivals:
                following = bisect.bisect_left(starts, arrival)
                if following < len(starts):
                    busy.append((starts[following] - arrival, following >= number))
        elif step.shape.woken and arrivals:
            idle.append(((step.shape.idle,), max(0.0, step.recorded.start - arrivals[0])))
        was_busy = step.is_busy
    to_wake, per_idle = rising(idle, LONGEST_WAY) if idle else (0.0, 0.0)
    if not busy:
        return to_wake, 0.0, per_idle
    arrival = dividing(busy)
    return arrival, max(0.0, to_wake - arrival), per_idle


def dividing(points: Sequence[tuple[float, bool]]) -> float:
    """The number that divides numbers best: the fewest above it are not marked, or below it are.
    0 if all are above."""
    ordered = sorted(points)
    wrong = least = sum(not marked for _, marked in ordered)
    best = 0.0
    for (value, marked), (above, _) in itertools.pairwise([*ordered, ordered[-1]]):
        wrong += 1 if marked else -1
        if wrong < least:
            least, best = wrong, (value + above) / 2
    return best
