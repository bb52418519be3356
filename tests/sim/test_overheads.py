"""What a calibration asks of an engine, and what it makes of the pauses between steps."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from quire.config.scheduler import SchedulerConfig
from quire.core.facts import FactKind, FactLog
from quire.engine import calibration
from quire.engine.async_llm import AsyncLLM
from quire.engine.calibration import (
    DECODES,
    LEAST_OF_USERS,
    QUIET,
    SETTLED,
    CalibrationLoad,
    Measured,
    _mean,
    delivery,
    dividing,
    of_load,
    ways_in,
)
from quire.params import SamplingParams
from quire.sim.lockstep import Replayed, measured_overheads, rising
from quire.sim.step_time import Overheads, StepShape
from quire.workload.trace import Trace, TraceHeader, TraceRequest


def steps(pauses: list[tuple[int, float]], busy: bool = True) -> list[Any]:
    """Steps of 10 ms with so many rows, each followed by a pause."""
    replayed, now = [], 0.0
    for rows, pause in [*pauses, (1, 0.0)]:
        recorded = SimpleNamespace(start=now, seconds=0.01)
        shape = StepShape(rows, rows, 0, 0, 0)
        replayed.append(SimpleNamespace(recorded=recorded, shape=shape, is_busy=busy, arrivals=0))
        now += 0.01 + pause
    return replayed


def test_pauses_grow_with_the_requests() -> None:
    found = measured_overheads(steps([(rows, 1e-4 + rows * 1e-5) for rows in (1, 2, 4, 8) * 5]))
    assert found.gap == pytest.approx(1e-4)
    assert found.gap_per_row == pytest.approx(1e-5)


def test_pauses_are_longer_after_prompts_and_with_arrivals() -> None:
    rng, pauses, kinds = random.Random(0), [], []
    for _ in range(400):
        rows, prompts, came = rng.randint(1, 40), rng.randint(0, 1), rng.choice([0, 0, 1, 3])
        more = prompts * rng.randint(1, 2000)
        kinds.append((rows, 2 * prompts, came, more))
        taken_in = 6e-5 * came + 4e-5 * min(came, 1)
        pauses.append((rows, 5e-5 + 2e-6 * rows + 9e-5 * prompts + taken_in + 2e-7 * more))
    replayed = steps(pauses)
    for before, after, (rows, prompts, came, more) in zip(
        replayed, replayed[1:], kinds, strict=False
    ):
        before.shape, after.arrivals = StepShape(rows + more, rows, prompts, 0, 0), came
    found = measured_overheads(replayed)
    assert (found.gap, found.gap_per_row) == pytest.approx((5e-5, 2e-6))
    assert (found.gap_after_prompt, found.gap_per_arrival) == pytest.approx((9e-5, 6e-5))
    assert (found.gap_per_prompt_token, found.gap_of_arrival) == pytest.approx((2e-7, 4e-5))
    said = [
        found.pause(before.shape, after.arrivals)
        for before, after in zip(replayed, replayed[1:], strict=False)
    ]
    assert said == pytest.approx([pause for _, pause in pauses])


def test_several_calibrations_count_alike() -> None:
    one = Overheads(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0)
    other = Overheads(3.0, 2.0, 1.0, 0.0, 6.0, 2.0, 2.0)
    assert _mean([one, other]) == Overheads(2.0, 2.0, 2.0, 2.0, 5.5, 4.0, 1.5)


def test_the_first_decodes_of_a_round_do_not_count() -> None:
    """But those of users do, and what warms the engine up never does."""
    sizes = [2, *[1] * 20] * 3  # prompts, then decodes: of the warm-up, a round and a user
    replayed = [
        SimpleNamespace(
            shape=StepShape(tokens, 1, tokens - 1, 0, 0),
            recorded=SimpleNamespace(start=0.1 * number, seconds=0.1),
        )
        for number, tokens in enumerate(sizes)
    ]
    load = SimpleNamespace(sent=[50.0], rounds=[(50.0, 52.05), (52.05, 54.15)])
    arrivals = [0.0] * 4 + [2.05, 4.15]  # the warm-up has four requests
    trace = SimpleNamespace(requests=[SimpleNamespace(arrival=at) for at in arrivals])
    measured = Measured(cast(Any, load), cast(Any, trace), cast(Any, replayed))
    kept = [round(10 * step.recorded.start) for step in measured.warm()]
    assert kept == [21, *range(22 + SETTLED, 63)]


@pytest.mark.parametrize("rows", [(4, 4, 4), (1, 4, 16)])
def test_more_requests_never_shorten_a_pause(rows: tuple[int, ...]) -> None:
    found = measured_overheads(steps([(n, 1e-3 / n) for n in rows]))
    assert found.gap_per_row == 0.0
    assert found.gap == pytest.approx(sum(1e-3 / n for n in rows) / len(rows))


def test_pauses_without_work_do_not_count() -> None:
    assert measured_overheads(steps([(1, 1.0)] * 3, busy=False)) == Overheads()


def test_a_delivery_counts_from_the_step_that_made_the_token() -> None:
    """Not from a later step that ended before the token came."""
    log, recorded = FactLog(), []
    number = log.name("one")
    kinds = [(FactKind.ADMITTED, 6, 0), (FactKind.CHUNK, 4, 6), None]
    for step, kind in enumerate(kinds):
        log.begin_step(step, 0.01 * step)
        if kind is not None:
            log.add(kind[0], number, a=kind[1], b=kind[2])
        one = SimpleNamespace(start=0.01 * step, seconds=0.01, facts=log.take()[0])
        recorded.append(SimpleNamespace(recorded=one, shape=StepShape(4, 1, 1, 0, 0)))
    load = SimpleNamespace(sent=[100.0], first={0: 100.032})
    trace = Trace(TraceHeader(), [TraceRequest(0.0, 10, 2, number=number)])
    steps = cast(list[Replayed], recorded)
    found = delivery(cast(CalibrationLoad, load), trace, steps, {number})
    assert found == pytest.approx((0.012, 0.0, 0.0))
    assert delivery(cast(CalibrationLoad, load), trace, steps, set()) == (0.0, 0.0, 0.0)


def test_what_rises_with_its_counts() -> None:
    rng = random.Random(3)
    points = [((n, m), 2.0 + 0.5 * n + 3.0 * m) for n in range(9) for m in (0, 0.2, 1.1)]
    rng.shuffle(points)
    assert rising(points, 5.0) == pytest.approx([2.0, 0.5, 3.0])
    stood_still = [(counts, 1000.0 if i == 4 else s) for i, (counts, s) in enumerate(points)]
    zero, per_n, per_m = rising(stood_still, 5.0)
    usual = sum(seconds for _, seconds in points)
    assert sum(zero + per_n * n + per_m * m for (n, m), _ in points) < 1.3 * usual
    assert rising([((0.3,), 4.0)], 5.0)[1] >= 0.0, "one point tells something"
    falling = [((n,), 10.0 - n) for n in range(9)]
    assert rising(falling, 5.0) == pytest.approx([6.0, 0.0])


def test_a_delivery_takes_longer_the_more_requests_a_step_has_and_the_longer_the_rest_was() -> None:
    log, recorded, requests, first = FactLog(), [], [], {}
    for number, (rows, idle) in enumerate([(1, 0.0), (8, 0.0), (1, 1.1), (8, 0.3)] * 3):
        log.begin_step(number, float(number))
        name = log.name(str(number))
        log.add(FactKind.ADMITTED, name, a=10, b=0)
        one = SimpleNamespace(start=float(number), seconds=0.01, facts=log.take()[0])
        shape = StepShape(9, rows, 1, 0, 0, 0.0, int(idle > 0), idle)
        recorded.append(SimpleNamespace(recorded=one, shape=shape))
        requests.append(TraceRequest(float(number), 10, 2, number=name))
        first[number] = 100 + number + 0.01 + 0.001 + 0.0001 * rows + 0.02 * idle
    load = SimpleNamespace(sent=[100.0], first=first)
    found = delivery(
        cast(CalibrationLoad, load),
        Trace(TraceHeader(), requests),
        cast(list[Replayed], recorded),
        {request.number for request in requests},
    )
    assert found == pytest.approx((0.001, 0.0001, 0.02))


def test_the_way_to_a_busy_engine_is_told_by_who_came_with_which_step() -> None:
    """A step begins every 10 ms; requests take 3 ms on their way, and 7 ms to an engine that
    sleeps, 20 ms more where it has slept so long that `idle` is 1. One comes a step too late,
    because the machine stood still."""
    rng, log, recorded, requests = random.Random(1), FactLog(), [], []
    arrivals = sorted(rng.uniform(0.0, 3.97) for _ in range(400))
    due = [math.ceil((at + 0.003) / 0.01) for at in arrivals]
    due[200] = max(due[200] + 1, due[201])
    due[201:] = [max(step, due[200]) for step in due[201:]]
    sleeps = [5.0 + 0.1 * number for number in range(20)]
    idles = [0.1 * (number % 5) for number in range(20)]
    woken = [at + 0.007 + 0.02 * idle for at, idle in zip(sleeps, idles, strict=True)]
    starts = [0.01 * number for number in range(401)] + woken
    for number, start in enumerate(starts):
        log.begin_step(number, start)
        came = [i for i, step in enumerate(due) if step == number]
        came += [400 + number - 401] if number > 400 else []
        for i in came:
            name = log.name(str(i))
            log.add(FactKind.QUEUED, name)
            requests.append(TraceRequest([*arrivals, *sleeps][i], 10, 2, number=name))
        one = SimpleNamespace(start=start, seconds=0.009, facts=log.take()[0])
        sleep = (1, idles[number - 401]) if number > 400 else (0, 0.0)
        shape = StepShape(4, 1, 1, 0, 0, 0.0, *sleep)
        recorded.append(SimpleNamespace(recorded=one, shape=shape, is_busy=number < 400))
    trace = Trace(TraceHeader(), requests)
    numbers = {request.number for request in requests}
    arrival, wake, per_idle = ways_in(trace, cast(list[Replayed], recorded), numbers)
    assert arrival == pytest.approx(0.003, abs=5e-4)
    assert arrival + wake == pytest.approx(0.007) and per_idle == pytest.approx(0.02)
    assert ways_in(trace, cast(list[Replayed], recorded), set()) == (0.0, 0.0, 0.0)


def test_a_number_that_divides() -> None:
    assert dividing([(3.0, True), (1.0, False), (2.0, True), (0.5, True), (1.2, False)]) == 1.6
    assert dividing([(3.0, True), (1.0, True)]) == 0.0
    assert dividing([(3.0, False), (1.0, False)]) == 3.0


def test_ways_are_those_of_users_if_there_are_enough() -> None:
    """Requests that come together wait for each other."""
    for count in (LEAST_OF_USERS - 1, LEAST_OF_USERS):
        requests = [
            TraceRequest(0.1 * number, 10, 2, number=number) for number in range(10 + count)
        ]
        load = SimpleNamespace(sent=[50.0], rounds=[(50.0, 50.95)])
        measured = Measured(cast(Any, load), Trace(TraceHeader(), requests), [])
        users = set(range(10, 10 + count))
        assert measured._of_users() == (users if count == LEAST_OF_USERS else users | {*range(10)})


def test_what_others_asked_for_between_runs_does_not_count() -> None:
    """Not even right after a run, or right before the next."""
    runs = [(100.0, 101.0), (102.0, 103.0)]
    mine = [0.0, 0.5, 0.99, 2.0, 2.99]  # by the recording's clock, which began at 100
    others = [1.0 + QUIET, 1.5, 2.0 - QUIET, 3.0 + QUIET]
    requests = [
        TraceRequest(at, 10, 2, number=number) for number, at in enumerate(sorted(mine + others))
    ]
    replayed = [SimpleNamespace(recorded=SimpleNamespace(start=r.arrival)) for r in requests]
    load = SimpleNamespace(sent=[100.0, 100.5, 100.99, 102.0, 102.99], runs=runs)
    found = of_load(
        cast(CalibrationLoad, load),
        Trace(TraceHeader(), requests),
        cast(list[Replayed], replayed),
    )
    assert [request.arrival for request in found.trace.requests] == mine
    assert [step.recorded.start for step in found.replayed] == mine


class Engine:
    """Stands for an engine that takes no time."""

    info: ClassVar = {"vocab_size": 50, "max_model_len": 300, "num_blocks": 400, "block_size": 16}

    def __init__(self) -> None:
        self.budgets: list[int] = []
        self.asked: dict[int, list[tuple[int, int]]] = {}
        # by the budget, the lengths of prompts and outputs

    async def set_limits(self, *, max_num_batched_tokens: int) -> None:
        self.budgets.append(max_num_batched_tokens)

    async def generate(
        self, prompt: list[int], params: SamplingParams, name: str
    ) -> AsyncIterator[None]:
        assert max(prompt) < 50 and len(prompt) + (params.max_tokens or 0) <= 300
        self.asked.setdefault(self.budgets[-1], []).append((len(prompt), params.max_tokens or 0))
        await asyncio.sleep(0.001)
        yield None


def test_short_calibrations_have_long_rounds_once_there_were_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else nobody ever measures many long prompts together."""

    class Slow(Engine):
        info: ClassVar = {**Engine.info, "num_blocks": 800}

        def __init__(self) -> None:
            super().__init__()
            self.together, self.most, self.turn = 0, 0, asyncio.Lock()

        async def generate(
            self, prompt: list[int], params: SamplingParams, name: str
        ) -> AsyncIterator[None]:
            counts = len(prompt) >= 128 and params.max_tokens == DECODES
            self.together += counts
            self.most = max(self.most, self.together)
            async with self.turn:
                await asyncio.sleep(2e-5 * len(prompt))
            self.together -= counts
            yield None

    for name, value in (("SHARE", 0.005), ("LEAST_SHARE", 0.01), ("LEAST_VISIT", 0.001)):
        monkeypatch.setattr(calibration, name, value)
    monkeypatch.setattr(calibration, "PAUSES", 0.0)
    engine, limits = Slow(), SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=640)
    load = CalibrationLoad(cast(AsyncLLM, engine), limits, 1.5, lambda what, share: None)
    most = []

    async def measure() -> None:
        for earlier in ([], [(0.0, 100.0)]):
            load.runs.extend(earlier)
            await load.run()
            most.append(engine.most)

    asyncio.run(measure())
    assert most[0] < most[1] == 16


def test_a_calibration_asks_for_every_kind_of_round_and_has_users_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("SHARE", 0.02), ("LEAST_SHARE", 0.01), ("LEAST_VISIT", 0.001)):
        monkeypatch.setattr(calibration, name, value)  # else there is time for two visits
    monkeypatch.setattr(calibration, "PAUSE", (0.1, 2.0))
    engine, limits = Engine(), SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=640)
    load = CalibrationLoad(cast(AsyncLLM, engine), limits, 1.2, lambda what, share: None)
    asyncio.run(load.run())
    in_rounds = {
        prompt for asked in engine.asked.values() for prompt, out in asked if out == DECODES
    }
    for found, kinds in ((engine.asked, (32, 128, 256, 512)), (in_rounds, (4, 32, 128))):
        for least in kinds:
            assert any(least <= each <= 2 * least for each in found), least
    assert max(engine.asked) == 640 and max(in_rounds) <= 256
    assert len(engine.asked) > 10 and len(in_rounds) > 10, "sizes that kernels like are not all"
    users = [asked for asked in engine.asked[640] if asked[1] != DECODES]
    assert len({prompt for prompt, _ in users}) > 10 and len(users) > 30
    assert len(load.first) == len(load.sent) > 100
    assert any(b - a > 0.1 for a, b in itertools.pairwise(load.sent)), "it pauses as well"
    ((begin, end),) = load.runs
    assert begin <= min(load.sent) and max(load.first.values()) <= end
