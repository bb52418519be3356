"""Runs of the simulator: everybody gets their tokens, times add up, and nothing is left over."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.sim.measured_pace import measured_pace, measured_spells
from quire.sim.pace import MachinePace, calibrated_pace
from quire.sim.sequences import Sequences
from quire.sim.simulator import Pool, SimulatedRun, Simulator
from quire.sim.step_time import FORGETTING, Overheads, StepShape, StepTimeModel
from quire.workload.trace import TraceRequest

TIMES = StepTimeModel(1e-3, (1e-5,) * 14, overheads=Overheads(1e-4, 0.0, 2e-3, 1e-3))


def config(**options: object) -> EngineConfig:
    given = EngineConfig.from_options(**({"max_model_len": 2048} | options))
    return given


def requests(count: int, rate: float, seed: int = 0) -> Iterator[TraceRequest]:
    rng, now = random.Random(seed), 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        yield TraceRequest(now, rng.randint(1, 300), rng.randint(1, 60))


def simulate(
    traced: list[TraceRequest], blocks: int = 500, times: StepTimeModel = TIMES, **options: object
) -> SimulatedRun:
    simulator = Simulator(config(**options), Pool(blocks), times, keep_token_times=True)
    outcome = simulator.run(traced, Sequences(traced, 16))
    simulator.scheduler.check_integrity()
    assert not simulator.executor.live and not simulator.scheduler.requests
    return outcome


def test_one_request_takes_what_its_steps_take() -> None:
    outcome = simulate([TraceRequest(5.0, 100, 3)])
    first = 5.0 + 2e-3 + 1e-3 + 100e-5 + 1e-3  # known, step, tokens, seen
    assert outcome.first_tokens[0] == pytest.approx(first)
    each = 1e-3 + 1e-5 + 1e-4
    assert outcome.ends[0] == pytest.approx(first + 2 * each)
    assert outcome.duration == pytest.approx(3 * 1e-4 + 3e-3 + 102e-5, rel=1e-6)


def test_everybody_gets_all_tokens_in_order() -> None:
    traced = list(requests(300, 500.0))
    outcome = simulate(traced, blocks=130, max_num_seqs=64)
    assert list(outcome.output_lens) == [r.output_len for r in traced]
    assert outcome.num_preemptions > 0
    for i, request in enumerate(traced):
        times = outcome.token_times[i]
        assert len(times) == request.output_len and list(times) == sorted(times)
        assert request.arrival < outcome.first_tokens[i] == times[0] <= outcome.ends[i] == times[-1]


def test_tokens_of_larger_steps_take_longer_to_their_callers_and_none_overtakes_them() -> None:
    overheads = dataclasses.replace(TIMES.overheads, output_per_row=1e-3)
    times = dataclasses.replace(TIMES, overheads=overheads, _table=[])
    # All come at once and end together but for the last, whose next step has one row.
    traced = [TraceRequest(0.0, 10, 2 + (number == 9)) for number in range(10)]
    even, slow = simulate(traced), simulate(traced, times=times)
    late = [b - a for a, b in zip(even.first_tokens, slow.first_tokens, strict=True)]
    assert late == pytest.approx([10e-3] * 10)
    last = slow.token_times[9]
    assert last[2] == last[1] > even.token_times[9][1]


def test_a_slower_machine_and_a_higher_rate_take_longer() -> None:
    def mean_wait(rate: float, times: StepTimeModel) -> float:
        done = simulate(list(requests(200, rate)), times=times)
        waits = [f - a for f, a in zip(done.first_tokens, done.arrivals, strict=True)]
        return sum(waits) / len(waits)

    slow = StepTimeModel(4e-3, (4e-5,) * 14)
    assert mean_wait(5.0, TIMES) < mean_wait(100.0, TIMES) < mean_wait(100.0, slow)


def test_shared_beginnings_are_found_in_the_cache() -> None:
    traced = [TraceRequest(i * 1.0, 100 + i, 5, number=i) for i in range(1, 6)]
    for request in traced[1:]:
        request.shared_with, request.shared_len = 1, 70
    assert list(simulate(traced).cached_tokens) == [0, 70, 70, 70, 70]
    hashes = [TraceRequest(i * 1.0, 100, 5, block_hashes=["a", "b", "c"]) for i in range(3)]
    assert list(simulate(hashes).cached_tokens) == [0, 48, 48]
    assert list(simulate(hashes, enable_prefix_caching=False).cached_tokens) == [0, 0, 0]


def test_prompts_that_no_engine_would_take_are_counted() -> None:
    outcome = simulate([TraceRequest(0.0, 2048, 1), TraceRequest(0.0, 2047, 9)])
    assert outcome.num_refused == 1 and list(outcome.output_lens) == [1]


def test_a_request_ended_before_its_first_token_does_not_hang() -> None:
    outcome = simulate([TraceRequest(0.0, 10, 0)])
    assert outcome.output_lens[0] == 1 and not math.isnan(outcome.first_tokens[0])


def test_a_long_run_leaves_nothing_but_its_results() -> None:
    simulator = Simulator(config(), Pool(3000), TIMES)
    stream = requests(4000, 500.0)  # a generator: nobody holds all of them
    outcome = simulator.run(stream, Sequences((), 16))
    assert len(outcome) == 4000 and not outcome.token_times
    assert not simulator.executor.live and not simulator.scheduler.requests
    assert not simulator.scheduler.facts.take()[0]
    assert len(simulator._params) <= 60


def test_few_steps_already_vary_around_their_mean() -> None:
    """Twenty prompts, one after the other: some take half as long and some one and a half times,
    and together they take what they take without a spread, within a tenth."""
    prompts = [TraceRequest(10.0 * n, 300, 1) for n in range(20)]
    even = simulate(prompts)
    spread = tuple(0.5 + n / 99 for n in range(100))
    varied = simulate(prompts, times=dataclasses.replace(TIMES, prompt_spread=spread, _table=[]))
    waits = [
        [first - came for first, came in zip(run.first_tokens, run.arrivals, strict=True)]
        for run in (even, varied)
    ]
    assert sum(waits[1]) == pytest.approx(sum(waits[0]), rel=0.1)
    assert max(waits[1]) > 1.3 * min(waits[1]) > 1.3 * 0.5 * min(waits[0])
    others = simulate(prompts, times=dataclasses.replace(TIMES, spread=spread, _table=[]))
    assert list(others.first_tokens) == list(even.first_tokens), "that is of decodes"


def test_a_slow_spell_of_the_machine_is_a_slow_spell_of_the_simulation() -> None:
    traced = [TraceRequest(float(second), 1, 101) for second in range(4)]
    times = StepTimeModel(1e-3, (0.0,) * 14)
    pace = MachinePace((1.0, 3.0, 1.0), (9.0,))
    simulator = Simulator(config(), Pool(500), times, pace=pace.takes)
    outcome = simulator.run(traced, Sequences(traced, 16))
    took = [end - start for start, end in zip(outcome.arrivals, outcome.ends, strict=True)]
    assert took == pytest.approx([0.101, 0.303, 0.101, 0.101])


def test_pauses_are_longer_in_a_slow_spell_too() -> None:
    """And so is what others add to them who come meanwhile."""
    two = [TraceRequest(float(second), 1, 101) for second in range(2)]
    overheads = Overheads(gap=1e-3, gap_per_arrival=0.1)
    times = StepTimeModel(1e-3, (0.0,) * 14, overheads=overheads)
    pace = MachinePace((1.0, 2.0), (9.0,))

    def took(traced: list[TraceRequest]) -> list[float]:
        outcome = Simulator(config(), Pool(500), times, pace=pace.takes).run(
            traced, Sequences(traced, 16)
        )
        return [e - s for s, e in zip(outcome.arrivals, outcome.ends, strict=True)]

    assert took(two) == pytest.approx([0.201, 0.402])
    assert took([*two, TraceRequest(1.01, 1, 1)])[1] == pytest.approx(0.402 + 0.2)


def test_the_pace_is_what_steps_took_by_what_was_said() -> None:
    times = StepTimeModel(1e-3, (0.0,) * 14)
    starts = {10.2: 2e-3, 10.8: 4e-3, 13.1: 6e-3}
    # A step without tokens counts for nothing; a second without steps is as all were.
    steps = [stepped(start, seconds) for start, seconds in starts.items()]
    pace = measured_pace([*steps, stepped(12.5, 9.0, tokens=0)], times, start=10.0)
    assert pace.decodes == pytest.approx((3.0, 4.0, 4.0, 6.0)) and pace.prompts == (1.0,)
    assert [pace.at(t) for t in (-5.0, 0.5, 3.5, 99.0)] == pytest.approx([3.0, 3.0, 6.0, 6.0])
    assert measured_pace([], times).at(1.0) == 1.0


def test_memory_may_be_slow_while_computing_is_not() -> None:
    """Steps with prompts have a pace of their own."""
    times = StepTimeModel(1e-3, (0.0,) * 14)
    some = [stepped(0.1, 2e-3), stepped(0.2, 5e-3, prefills=1), stepped(1.1, 4e-3)]
    pace = measured_pace(some, times)
    assert pace.decodes == pytest.approx((2.0, 4.0)) and pace.prompts == pytest.approx((5.0,))
    assert [pace.takes(t, 1e-3, n) for t, n in ((0.5, 0), (0.5, 2), (1.5, 0), (1.5, 1))] == (
        pytest.approx([2e-3, 5e-3, 4e-3, 5e-3])
    )
    traced = [TraceRequest(float(second), 300, 101) for second in range(2)]
    simulator = Simulator(config(), Pool(500), times, pace=pace.takes)
    outcome = simulator.run(traced, Sequences(traced, 16))
    took = [end - start for start, end in zip(outcome.arrivals, outcome.ends, strict=True)]
    assert took == pytest.approx([0.205, 0.405])


def test_a_machine_that_stood_still_is_no_slow_machine() -> None:
    """In a step, and between two steps of an engine that had something to do."""
    times = StepTimeModel(1e-3, (0.0,) * 14)
    steps = [
        stepped(0.1, 1e-3), stepped(0.2, 0.151), stepped(0.4, 1e-3, is_busy=True),
        stepped(0.461, 1e-3, is_busy=True), stepped(0.463, 1e-3), stepped(0.9, 1e-3),
    ]  # fmt: skip
    pace = measured_pace(steps, times)
    assert pace.decodes == pytest.approx((1.0,))
    assert [each for stall in pace.stalls for each in stall] == pytest.approx(
        [0.2, 0.15, 0.401, 0.06]
    )
    # Before, into it, within it, after it, and through both.
    for start, usual, takes in (
        (0.1, 0.01, 0.01), (0.195, 0.01, 0.16), (0.3, 0.01, 0.06), (0.35, 0.01, 0.01),
        (0.19, 0.1, 0.31),
    ):  # fmt: skip
        assert pace.takes(start, usual) == pytest.approx(takes)


def test_a_request_that_could_not_come_waited_for_the_machine() -> None:
    """On its way to an engine that had nothing to do; one that came in a step waited for that."""
    times = StepTimeModel(1e-3, (0.0,) * 14)
    steps = [
        stepped(10.3, 1e-3, sent=10.2), stepped(10.401, 0.1, sent=10.4),
        stepped(10.501, 1e-3, sent=10.45), stepped(10.6, 1e-3, sent=10.45),
    ]  # fmt: skip
    stalls = measured_pace(steps, times, start=10.0).stalls
    assert [each for stall in stalls for each in stall] == pytest.approx(
        [0.2, 0.1, 0.401, 0.099, 0.502, 0.098]
    )


def test_pauses_are_longer_after_prompts_and_for_each_request_that_comes() -> None:
    """To an engine that has something to do; its first request comes as `arrival` says."""
    overheads = Overheads(gap=1e-3, gap_after_prompt=0.1, gap_per_arrival=1.0)
    times = StepTimeModel(1e-6, (0.0,) * 14, overheads=overheads)

    def took(requests: list[TraceRequest]) -> float:
        simulator = Simulator(config(), Pool(500), times)
        return simulator.run(requests, Sequences(requests, 16)).duration

    alone = [TraceRequest(0.0, 40, 3)]
    assert took(alone) == pytest.approx(0.103, abs=1e-4)
    second = [*alone, TraceRequest(0.05, 40, 1)]
    assert took(second) == pytest.approx(1.203, abs=1e-4), "it came while the first one ran"
    closed = Simulator(config(), Pool(500), times)
    outcome = closed.run_closed([TraceRequest(0.0, 40, n) for n in (2, 9, 1)], 2, Sequences([], 16))
    assert outcome.duration == pytest.approx(0.1 + 1.1 + 0.008, abs=3e-3), "the third came to one"


def test_the_first_request_in_a_pause_costs_more_than_those_beside_it() -> None:
    overheads = Overheads(gap_per_arrival=1.0, gap_of_arrival=10.0)
    times = StepTimeModel(1e-6, (1e-3,) + (0.0,) * 13, overheads=overheads)

    def took(arrivals: list[float]) -> float:
        requests = [TraceRequest(0.0, 40, 40), *(TraceRequest(at, 40, 1) for at in arrivals)]
        return Simulator(config(), Pool(500), times).run(requests, Sequences(requests, 16)).duration

    assert took([1e-4] * 3) == pytest.approx(13.04, abs=0.01), "they came in one step"
    assert took([1e-4, 11.01, 22.02]) == pytest.approx(33.04, abs=0.01)

    closed = Simulator(config(), Pool(500), times)
    requests = [TraceRequest(0.0, 40, n) for n in (1, 1, 1, 9, 1, 1, 1)]
    outcome = closed.run_closed(requests, 4, Sequences([], 16))
    assert outcome.duration == pytest.approx(13.01, abs=0.01), "three came to one"


def test_an_engine_that_has_nothing_to_do_has_to_wake() -> None:
    """Who comes meanwhile comes with the first; who comes to a busy engine does not wait so."""
    times = StepTimeModel(1e-3, (0.0,) * 14, overheads=Overheads(arrival=0.1, wake=1.0))
    requests = [TraceRequest(at, 40, 2000 if at else 1) for at in (0.0, 0.9, 5.0, 6.5)]
    outcome = Simulator(config(), Pool(500), times).run(requests, Sequences(requests, 16))
    first = [seen - at for seen, at in zip(outcome.first_tokens, outcome.arrivals, strict=True)]
    assert first == pytest.approx([1.101, 0.201, 1.101, 0.101], abs=2e-3)


def test_the_longer_an_engine_had_nothing_to_do_the_slower_it_begins() -> None:
    """On a request's way, in its first step and on its way back."""
    overheads = Overheads(arrival=0.1, wake_per_idle=0.01, output_per_idle=0.04)
    times = StepTimeModel(1e-3, (0.0,) * 14, overheads=overheads, per_idle=0.02)
    requests = [TraceRequest(at, 40, 3) for at in (1.0, 11.0, 11.101)]
    outcome = Simulator(config(), Pool(500), times).run(requests, Sequences(requests, 16))
    first = [seen - at for seen, at in zip(outcome.first_tokens, outcome.arrivals, strict=True)]
    for rest, ttft in zip((1.1, 10.0), first, strict=False):
        assert ttft == pytest.approx(0.101 + 0.07 * math.log1p(rest / FORGETTING), rel=0.03)
    # The third came while the second was under way: it waits for that step, no longer.
    assert first[2] < first[1] + 0.002


def test_a_chunk_that_ends_no_prompt_does_not_read_the_head() -> None:
    times = StepTimeModel(1e-3, (0.0,) * 14, per_head=1.0)
    requests = [TraceRequest(0.0, 150, 2)]
    settings = config(max_num_batched_tokens=64, max_num_seqs=8)
    outcome = Simulator(settings, Pool(500), times).run(requests, Sequences(requests, 16))
    assert outcome.num_steps == 4 and outcome.busy_seconds == pytest.approx(2.004)


def spelled(seconds: int, slow: dict[int, float], rng: random.Random) -> list[Any]:
    """Steps of 2 ms a decode and 10 ms a prompt, half of the time each; slower in some seconds."""
    made = []
    for second in range(seconds):
        for step in range(80):
            now, prompts = second + step / 80, step % 6 == 0
            usual = 10e-3 if prompts else 2e-3
            took = usual * slow.get(second, 1.0) * rng.uniform(0.9, 1.1)
            made.append(stepped(now, took, 64 if prompts else 1, prefills=int(prompts)))
    return made


def test_spells_are_the_seconds_in_which_a_calibration_was_slow() -> None:
    """Beside what a model says too much or too little of a kind of step, and stalls."""
    times = StepTimeModel(2e-3, (0.0,) * 14)  # prompts take five times as long as it says
    steps = spelled(20, {4: 1.6, 5: 1.6, 12: 1.3}, random.Random(0))
    steps[900].recorded.seconds = 5.0
    spells = [*measured_spells(steps, times).values()]
    assert len(spells) == 20
    for sort in (0, 1):
        of = [each[sort] for each in spells]
        assert sum(of) / 20 == pytest.approx(1.0, abs=1e-3)
        usual = sorted(of)[8]
        assert usual == pytest.approx(0.93, abs=0.05)
        assert min(of[4], of[5]) > of[12] + 0.05 > usual + 0.15 + 0.05
        assert sum(each > 1.1 * usual for each in of) == 3


def test_what_a_model_says_wrongly_of_a_kind_of_step_is_no_spell() -> None:
    times = StepTimeModel(2e-3, (0.0,) * 14)
    steps = [
        stepped(second + 0.01 * i, 4e-3 if second % 2 else 2e-3, 16 if second % 2 else 1)
        for second in range(6)
        for i in range(90)
    ]
    assert [ratio for each in measured_spells(steps, times).values() for ratio in each] == (
        pytest.approx([1.0] * 12)
    )


def test_few_steps_say_little_of_how_fast_the_machine_was() -> None:
    """On average it was as fast as on average."""
    times = StepTimeModel(20e-3, (0.0,) * 14)
    counts = [30, *[5] * 9]
    steps = [
        stepped(second + 0.03 * i, 20e-3 if second else 40e-3, prefills=1)
        for second, count in enumerate(counts)
        for i in range(count)
    ]
    prompts = [prompts for _, prompts in measured_spells(steps, times).values()]
    assert 1.3 < prompts[0] / prompts[1] < 1.8, "they took twice as long"
    said = sum(count * ratio for count, ratio in zip(counts, prompts, strict=True))
    assert said / sum(counts) == pytest.approx(1.0, abs=1e-3)


def test_seconds_with_little_in_them_are_no_spells() -> None:
    times = StepTimeModel(2e-3, (0.0,) * 14)
    some = [stepped(0.01 * i, 2e-3) for i in range(100)]  # 0.2 s of steps in a second
    few = [stepped(5.0 + 0.01 * i, 9e-3) for i in range(10)]
    later = [stepped(9.0 + 0.01 * i, 4e-3) for i in range(100)]
    found = measured_spells([*some, *few, *later], times)
    assert list(found) == [0, 9]
    spells = [*found.values()]
    assert [prompts for _, prompts in spells] == [1.0, 1.0]
    assert 1.3 < spells[1][0] / spells[0][0] < 2.0, "nearer to 1 than they were"
    assert measured_spells([], times) == {}


def test_the_pace_of_a_calibration_comes_over_and_over() -> None:
    slow = StepTimeModel(1e-3, (0.0,) * 14, spells=((1.0, 1.0), (3.0, 2.0)))
    pace = calibrated_pace(slow)
    assert pace is not None and [pace.at(t, 1) for t in (0.5, 1.5, 2.5, 99.9)] == [1, 2, 1, 2]
    assert calibrated_pace(TIMES) is None
    traced = [TraceRequest(float(second), 1, 101) for second in range(6)]

    def took(**options: Any) -> list[float]:
        simulator = Simulator(config(), Pool(500), slow, **options)
        outcome = simulator.run(traced, Sequences(traced, 16))
        return [end - start for start, end in zip(outcome.arrivals, outcome.ends, strict=True)]

    assert took(pace=pace.takes) == pytest.approx([0.101, 0.303] * 3)
    assert took() == pytest.approx([0.101] * 6), "only if asked for"


def stepped(
    start: float,
    seconds: float,
    tokens: int = 1,
    *,
    prefills: int = 0,
    is_busy: bool = False,
    sent: float | None = None,
) -> Any:
    shape = StepShape(tokens, tokens, prefills, 0, 0)
    recorded = SimpleNamespace(start=start, seconds=seconds)
    return SimpleNamespace(recorded=recorded, shape=shape, is_busy=is_busy, sent=sent)


def test_ids_that_are_drawn_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = TraceRequest(0.0, 100, 30, number=1)
    whole = Sequences([traced], 16).make(traced, with_output=True)
    monkeypatch.setattr("quire.sim.sequences.DRAWN", 7)
    assert Sequences([traced], 16).make(traced, with_output=True) == whole
