"""How far the simulator is from the engine, on loads that it was not fitted to.

    python benchmarks/simulator_error.py                 # the embedded model, 14 minutes
    python benchmarks/simulator_error.py --model DIR     # with --seconds 25 --calibration 20
    python benchmarks/simulator_error.py --quick         # a few seconds per load
    python benchmarks/simulator_error.py --own-speed     # on a machine that does other things
    python benchmarks/simulator_error.py --again         # how far the engine is from itself
    python benchmarks/simulator_error.py --why           # which steps or pauses are wrong
    python benchmarks/simulator_error.py --other-engine  # calibrate another engine

Each of three rates, two mixes of lengths and two settings runs on a live engine (a core in its own
process, without HTTP) and in the simulator. Rates are shares of what the simulator says is
possible. All loads take turns, `--runs` times, with a short calibration of the same engine after
each, because a machine that others share is not as fast in one minute as in the next. Step times
are fitted to all calibrations together; the simulated machine is, in each run, as fast as it was in
the calibrations before and after that run. Medians of a figure over the runs are compared. Half the
loads run once before they count: the first requests of an engine wait for memory that the system
provides. With `--other-engine`, another one is calibrated in these turns, as `quire calibrate`
does: two engines of one machine differ by some percent, since their memory is not in the same
place. Prints the error of every figure, and the largest and mean of each.

The machine should do nothing else. If it does, `--own-speed` lets the simulated machine be, second
by second, as fast as the recorded steps of the live engine were, and requests come when the machine
could send them: what is left is the error of everything but the speed of the machine at that
moment. The line below says what comes at the calibrated speed. `--again` gives the live engine each
load once more, and says how far it was from before: what does not know the pace of the machine at
that time can hardly be nearer. `--why` says for each run how many times as long as calibrated its
steps took, by what was in them, and the pauses between them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from quire.bench.live_trace import play
from quire.bench.result import RequestRecord, summary
from quire.cli.simulate import records_of_run
from quire.config import EngineConfig
from quire.config.locate import located
from quire.engine.async_llm import AsyncLLM
from quire.engine.calibration import Calibration, Measuring, recorded_engine
from quire.executor.sizing import size_engine
from quire.sim.lockstep import Lockstep, Replayed, SimulatedEngine
from quire.sim.measured_pace import measured_pace, measured_spells
from quire.sim.pace import WINDOW, MachinePace
from quire.sim.scenario import pool_of, with_settings
from quire.sim.sequences import Sequences
from quire.sim.simulator import Simulator
from quire.sim.step_time import StepTimeModel
from quire.utils.collector import keep_present
from quire.workload.trace import TraceRequest, read_trace

SHARES = (0.3, 0.6, 0.85)
MIXES = {"chat": (120, 60), "summaries": (600, 20)}
SETTINGS: tuple[dict[str, int], ...] = (
    {"max_num_batched_tokens": 2048, "max_num_seqs": 64},
    {"max_num_batched_tokens": 256, "max_num_seqs": 16},
)
WARM_UP = 24.0
"""Seconds of calibrations before all."""
NUMBERS = itertools.count(1)
FIGURES = {
    "output_throughput": 5, "mean_ttft_ms": 10, "mean_tpot_ms": 10, "p99_ttft_ms": 20,
    "p99_tpot_ms": 20,
}  # fmt: skip
"""Figures, and the errors in percent that are to be kept."""


def load(mix: str, rate: float, seconds: float, seed: int) -> list[TraceRequest]:
    rng, now, made = random.Random(seed), 0.0, []
    prompt, output = MIXES[mix]
    while True:
        now += rng.expovariate(rate)
        if now > seconds and len(made) > 10:
            return made
        lengths = (
            max(2, min(3 * mean, round(rng.lognormvariate(0, 0.5) * mean)))
            for mean in (prompt, output)
        )
        # A number of its own for each: no prompt is found in the cache of another load.
        made.append(TraceRequest(now, *lengths, number=next(NUMBERS)))


def simulated(
    config: EngineConfig,
    info: dict,
    times: StepTimeModel,
    requests: list[TraceRequest],
    pace: MachinePace | None = None,
) -> tuple[dict, float]:
    started = time.perf_counter()
    takes = None if pace is None else pace.takes
    simulator = Simulator(config, pool_of(info), times, keep_token_times=True, pace=takes)
    run = simulator.run(requests, Sequences(requests, 16))
    took = time.perf_counter() - started
    return figures(records_of_run(run)), run.duration / took


def figures(records: list[RequestRecord]) -> dict:
    failed = [record.error for record in records if not record.ok]
    assert not failed, failed[0]
    duration = max(r.end or 0.0 for r in records) - min(r.start for r in records)
    return summary(records, duration)


def medians(runs: list[dict]) -> dict:
    """Of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in FIGURES}


def possible_rate(config: EngineConfig, info: dict, times: StepTimeModel, mix: str) -> float:
    """Requests per second, if they never have to be waited for."""
    requests = [TraceRequest(0.0, r.prompt_len, r.output_len) for r in load(mix, 100, 1.5, 9)]
    result, _ = simulated(config, info, times, requests)
    return result["request_throughput"]


def steps_of_runs(path: Path, numbers: list[int]) -> Iterator[list[Replayed]]:
    """The steps of each run of a recording: from its first request on until that of the next run.

    Args:
        path: Of the recording.
        numbers: How many requests each run had.
    """
    trace = read_trace(path)
    arrivals = sorted(request.arrival for request in trace.requests)
    ends = [*itertools.accumulate(numbers)]
    recorded = EngineConfig.from_dict(trace.header.config)
    steps = iter(Lockstep(trace, SimulatedEngine(trace, recorded, pool_of(trace.header.info))))
    step = next(steps, None)
    for end in ends:
        until = arrivals[end] if end < len(arrivals) else float("inf")
        these = []
        while step is not None and step.recorded.start < until:
            these.append(step)
            step = next(steps, None)
        yield these


def as_sent(requests: list[TraceRequest], records: Sequence[RequestRecord]) -> list[TraceRequest]:
    """Requests when they were really sent: a machine that stands still sends none, either."""
    sent = [
        structs.replace(request, arrival=record.start)
        for request, record in zip(requests, records, strict=True)
    ]
    return sorted(sent, key=lambda request: request.arrival)


def factor(steps: list[Replayed], times: StepTimeModel) -> float:
    """How many times as long steps took as calibrated; NaN without steps."""
    some = [step for step in steps if step.shape.tokens]
    said = sum(times.seconds(step.shape) for step in some)
    return sum(step.recorded.seconds for step in some) / said if said else float("nan")


def why(steps: list[Replayed], times: StepTimeModel) -> str:
    """Which steps or pauses are not as calibrated."""
    kinds: dict[str, list[Replayed]] = {"prompts": [s for s in steps if s.shape.prefills]}
    for low, high in ((1, 1), (2, 8), (9, 1 << 30)):
        name = f"decodes of {low}" if low == high else f"{low} to {high}" if high < 99 else "more"
        of_rows = [s for s in steps if low <= s.shape.rows <= high]
        kinds[name] = [s for s in of_rows if not s.shape.prefills]
    parts = [f"{name} {factor(some, times):.2f} x ({len(some)})" for name, some in kinds.items()]
    pace, pauses = measured_pace(steps, times), []
    for before, after in itertools.pairwise(steps):
        if before.is_busy and before.shape.tokens:
            began = before.recorded.start + before.recorded.seconds
            usual = times.overheads.pause(before.shape, after.arrivals)
            pauses.append((after.recorded.start - began, usual, usual * pace.at(began)))
    if pauses:
        mean, said, then = (1e6 * statistics.fmean(each) for each in zip(*pauses, strict=True))
        parts.append(f"pauses {mean:.0f} us, said {said:.0f}, at the machine's pace {then:.0f}")
    return "    " + ", ".join(parts)


class Load(NamedTuple):
    """What runs on both."""

    row: str
    settings: dict[str, int]
    config: EngineConfig
    """With these settings."""
    requests: list[TraceRequest]
    lives: list[dict]
    """Figures of the engine, by run."""
    knowing: list[dict]
    """Figures of a simulation that knows how fast the machine was, by run."""
    after: list[int]
    """By run, how many calibrations there were before."""


def loads(config: EngineConfig, info: dict, times: StepTimeModel, seconds: float) -> Iterator[Load]:
    for number, settings in enumerate(SETTINGS):
        changed, _ = with_settings(config, settings).resolve(config.model.read_shape())
        for mix in MIXES:
            most = possible_rate(changed, info, times, mix)
            for share in SHARES:
                row = f"{mix} {share * most:.1f}/s {'/'.join(map(str, settings.values()))}"
                requests = load(mix, share * most, seconds, seed=number)
                yield Load(row, settings, changed, requests, [], [], [])


async def compare(
    config: EngineConfig, info: dict, options: argparse.Namespace, record: Path
) -> None:
    calibration = Calibration(config, options.calibration, lambda what, share: None)
    async with AsyncExitStack() as engines:
        llm = await engines.enter_async_context(recorded_engine(config, record))
        if options.other_engine:
            measuring = await engines.enter_async_context(calibration.engine())
        else:
            measuring = calibration.of(llm, record)
        live = Live(llm, measuring, options.other_engine)
        for _ in range(math.ceil(WARM_UP / options.calibration)):
            await live.calibrate()
        await asyncio.sleep(1.0)  # the recorder writes
        measuring.read()
        todo = list(loads(config, info, calibration.fitted([measuring.measured]), options.seconds))
        await all_runs(live, todo, options)
    if not options.other_engine:
        measuring.read()
    times = calibration.fitted([measuring.measured])
    print(", ".join(f"{name}: {value}" for name, value in times.about.items()))
    if options.own_speed or options.why:
        explain(live.done, record, info, times, options)
    gc.collect()
    gc.freeze()  # to look through all that was recorded is no part of what a simulation takes
    speeds = tell(todo, info, Calibrated(measuring, times), options)
    print(f"simulated at {min(speeds):.0f} to {max(speeds):.0f} x real time")


class Run(NamedTuple):
    """What the live engine did once."""

    requests: int
    load: Load | None = None
    """What is compared; `None`: it was calibrated, or warmed up."""
    records: Sequence[RequestRecord] = ()


class Live:
    """The live engine.

    Args:
        llm: It.
        measuring: Calibrates it, or another engine.
        other: Whether it is another.
    """

    def __init__(self, llm: AsyncLLM, measuring: Measuring, other: bool) -> None:
        self._llm, self._measuring, self._other = llm, measuring, other
        self._calibrations = 0
        self.done: list[Run] = []

    async def calibrate(self) -> None:
        """Once more."""
        await self._llm.set_limits(**SETTINGS[0])  # those of the engine's start
        before = self._measuring.asked
        await self._measuring.run()
        self._calibrations += 1
        if not self._other:
            self.done.append(Run(self._measuring.asked - before))

    async def run(self, load: Load, counts: bool) -> None:
        """Run a load once; one that does not count warms the engine up."""
        keep_present()  # what earlier runs left is not looked through during this one
        await self._llm.set_limits(**load.settings)
        await self._llm.reset_prefix_cache()
        sequences = Sequences(load.requests, 16, self._llm.info["vocab_size"])
        records = await play(self._llm, load.requests, sequences, str(len(self.done)))
        self.done.append(Run(len(records), load if counts else None, records))
        if counts:
            load.lives.append(figures(records))
            load.after.append(self._calibrations)


async def all_runs(live: Live, todo: list[Load], options: argparse.Namespace) -> None:
    """Run all loads on the live engine, with calibrations between them."""
    for load in todo[: len(todo) // 2]:
        print(f"warming up: {load.row}", file=sys.stderr, flush=True)
        await live.run(load, False)
    for number in range(options.runs + options.again):
        for load in todo:
            print(f"run {number + 1}: {load.row}", file=sys.stderr, flush=True)
            await live.run(load, True)
            await live.calibrate()


def explain(
    done: list[Run], record: Path, info: dict, times: StepTimeModel, options: argparse.Namespace
) -> None:
    """What the recorded steps of the live engine say of each run."""
    numbers = [run.requests for run in done]
    for run, steps in zip(done, steps_of_runs(record, numbers), strict=True):
        load = run.load
        if load is None:
            continue
        if options.own_speed:
            sent = as_sent(load.requests, run.records)
            pace = measured_pace(steps, times, (steps[0].sent or 0.0) - sent[0].arrival)
            known, _ = simulated(load.config, info, times, sent, pace)
            load.knowing.append(known)
        if options.why:
            print(load.row + why(steps, times), flush=True)


class Calibrated:
    """How fast the machine was in each calibration.

    Args:
        measuring: All of them.
        times: Fitted to them.
    """

    def __init__(self, measuring: Measuring, times: StepTimeModel) -> None:
        self.times = times
        self._spans = measuring.spans
        self._windows = measured_spells(measuring.measured.warm(), times)

    def beside(self, after: int) -> MachinePace | None:
        """The seconds of the last calibration before a run, and of the first one after it."""
        found = [
            self._windows[window]
            for begin, end in self._spans[after - 1 : after + 1]
            for window in range(int(begin / WINDOW), int(end / WINDOW) + 1)
            if window in self._windows
        ]
        if not found:
            return None
        decodes, prompts = zip(*found, strict=True)
        return MachinePace(decodes, prompts, repeats=True)


def tell(
    todo: list[Load], info: dict, calibrated: Calibrated, options: argparse.Namespace
) -> list[float]:
    """Print all figures and errors; returns how many times faster than real time each load was, in
    the median run."""
    speeds = []
    known, as_calibrated, of_engine = ({name: [] for name in FIGURES} for _ in range(3))
    print(f"{'load':<44}" + "".join(f"{name.removesuffix('_ms'):>26}" for name in FIGURES))
    for one in todo:
        runs, times_faster = [], []
        for after in one.after[: options.runs]:
            pace = calibrated.beside(after)
            made, speed = simulated(one.config, info, calibrated.times, one.requests, pace)
            runs.append(made)
            times_faster.append(speed)
        speeds.append(statistics.median(times_faster))
        made, live, row = medians(runs), medians(one.lives[: options.runs]), one.row
        if options.own_speed:
            knowing = medians(one.knowing[: options.runs])
            print(f"{row:<44}" + _compared(live, knowing, known))
            row = "    as calibrated"
        print(f"{row:<44}" + _compared(live, made, as_calibrated))
        if options.again:
            print(f"{'    again':<44}" + _compared(live, one.lives[-1], of_engine), flush=True)
    for name, limit in FIGURES.items():
        if options.own_speed:
            print(f"{name:<20} {_said(known[name], limit)}, wanted {limit} %")
        print(f"{name:<20} {_said(as_calibrated[name], limit)}, as calibrated, wanted {limit} %")
        if options.again:
            print(f"{'    again':<20} {_said(of_engine[name], limit)}")
    return speeds


def _said(found: list[float], limit: float) -> str:
    beyond = sum(error > limit for error in found)
    return (
        f"mean error {statistics.mean(found):5.1f} %, largest {max(found):5.1f} %, "
        f"{beyond} of {len(found)} beyond"
    )


def _compared(live: dict, made: dict, errors: dict[str, list[float]]) -> str:
    cells = ""
    for name in FIGURES:
        error = 100 * (made[name] / live[name] - 1)
        errors[name].append(abs(error))
        cells += f"{live[name]:>10.1f} {made[name]:>8.1f} {error:>+5.0f}%"
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--other-engine", action="store_true")
    parser.add_argument("--own-speed", action="store_true")
    parser.add_argument("--runs", type=int, default=8, help="of each load")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--why", action="store_true")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    parser.add_argument("--calibration", type=float, default=2.5, help="seconds of each")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs must be at least 1, got {options.runs}")
    if options.quick:
        options.runs, options.seconds, options.calibration = 2, 3.0, 2.0
    config = located(
        EngineConfig.from_options(model=options.model, max_model_len=2048, max_num_seqs=64)
    )
    info = size_engine(config).info.to_dict()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(config, info, options, Path(folder) / "trace.jsonl"))


if __name__ == "__main__":
    main()
