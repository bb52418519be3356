"""`quire simulate`: what would have happened to the requests of a trace under other settings."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from quire.bench.result import RequestRecord, RunSettings, detailed, summary
from quire.bench.saved import now
from quire.bench.text_block import text_block
from quire.cli.benches.flags import check_writable
from quire.cli.parser import Parser
from quire.cli.progress import CommandProgress
from quire.cli.times import WHERE, add_times_flags, step_times
from quire.config import EngineConfig
from quire.config.cli import add_engine_flags, engine_config
from quire.errors import ConfigError
from quire.observability.recorder.chrome_trace import timeline
from quire.observability.recorder.ring import StepRecords
from quire.sim.lockstep import Lockstep, SimulatedEngine
from quire.sim.measured_pace import measured_pace
from quire.sim.pace import MachinePace, calibrated_pace
from quire.sim.scenario import (
    changes_sizes,
    pool_of,
    read_settings,
    recorded_config,
    with_settings,
)
from quire.sim.sequences import Sequences
from quire.sim.simulator import Pool, SimulatedRun, Simulator
from quire.sim.step_time import StepTimeModel
from quire.workload.trace import Trace, TraceRequest, read_trace

MOST_TOKEN_TIMES = 5_000_000
"""Output tokens up to which the time of each is kept, for inter-token latencies."""
TIMELINE_STEPS = 100_000
EPILOG = (
    "The scheduler and its KV cache are the engine's own; only the time that steps take is made "
    f"up. {WHERE} A trace that was recorded brings its configuration; with a MODEL, the flags are "
    "those of `quire serve`. See docs/simulator.md."
)


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("simulate", "Run a trace on the scheduler without a model.", epilog=EPILOG)
    parser.add_argument(
        "--trace",
        metavar="FILE",
        default=None,
        help="Of `quire serve --record`, or made otherwise.",
    )
    parser.add_argument(
        "--set", metavar="NAME=VALUE", nargs="+", action="extend", default=[],
        help="Settings to try, such as max_num_batched_tokens=1024.",
    )  # fmt: skip
    add_times_flags(parser)
    parser.add_argument(
        "--pace", choices=("usual", "calibrated", "recorded"), default="usual",
        help="How fast the machine is: always as step times say; second by second as it was in "
        "`quire calibrate`, over and over, for traces that last longer than that; or, second by "
        "second, as it was when the steps of the trace were recorded. Default: usual.",
    )  # fmt: skip
    parser.add_argument(
        "--timeline", metavar="FILE", default=None,
        help="Write the steps as a trace for ui.perfetto.dev, as `quire timeline` does.",
    )  # fmt: skip
    parser.add_argument(
        "--save-result", action="store_true", default=False,
        help="Write the result as JSON, in the schema of `quire bench`.",
    )  # fmt: skip
    parser.add_argument(
        "--save-detailed", action="store_true", default=False, help="With every request's times."
    )
    parser.add_argument(
        "--result-filename", metavar="FILE", default=None,
        help="Where to write it. Default: simulated-TIME.json.",
    )  # fmt: skip
    parser.add_argument(
        "--report", metavar="FILE", default=None,
        help="Write an HTML report with plots; with --set, beside the run without.",
    )  # fmt: skip
    parser.add_argument(
        "--bad-lines", choices=("refuse", "skip"), default="refuse",
        help="Whether lines of the trace that cannot be read are an error. Default: refuse.",
    )  # fmt: skip
    parser.add_config_flag()
    add_engine_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Simulate, print; returns the exit code."""
    namespace = build_parser().parse(arguments)
    if namespace.trace is None:
        raise ConfigError("--trace FILE is missing: record one with `quire serve --record FILE`")
    _check_files(namespace)
    trace = read_trace(namespace.trace, namespace.bad_lines)
    for line in trace.bad_lines:
        print(f"skipped: {line}")
    settings = read_settings(namespace.set)
    config, pool = scenario(namespace, trace, settings)
    times = needed_times(namespace, config, trace)
    pace = wanted_pace(namespace.pace, trace, times)
    records = StepRecords(TIMELINE_STEPS if namespace.timeline else 0, config.cache.block_size)
    started = time.perf_counter()
    kept = records if namespace.timeline else None
    with CommandProgress(patience=1.0) as progress:
        run = simulate(trace, config, pool, times, kept, pace, progress)
    took = time.perf_counter() - started
    result = result_of(run, config, times, settings, namespace.trace)
    result["simulated_in_seconds"] = took
    print(text_block(result, title=" Simulation Result "))
    print(told(run, took))
    print(f"step times: {times.about.get('source', 'a file')}")
    if namespace.report:
        _report(namespace, trace, settings, times, pace, (run, result))
    if namespace.timeline:
        write_json(namespace.timeline, timeline(records.snapshot()), "--timeline")
    if namespace.save_result or namespace.save_detailed:
        if namespace.save_detailed:
            result |= detailed(records_of_run(run))
        write_json(_result_file(namespace), result, "--result-filename")
    return 0


def _check_files(namespace: argparse.Namespace) -> None:
    check_writable(namespace.report, "--report")
    check_writable(namespace.timeline, "--timeline")
    check_writable(namespace.result_filename, "--result-filename")


def scenario(
    namespace: argparse.Namespace, trace: Trace, settings: dict[str, Any]
) -> tuple[EngineConfig, Pool]:
    """The configuration and its KV cache: as recorded, unless a model is named or a setting
    changes it.

    Raises:
        StartupError: no engine could start with it.
    """
    from quire.config.locate import located
    from quire.executor.sizing import size_engine

    recorded = trace.header.config
    if hasattr(namespace, "model") or not recorded:
        sized = size_engine(located(with_settings(engine_config(namespace), settings)))
        return sized.config, pool_of(sized.info.to_dict())
    config = with_settings(recorded_config(recorded), settings)
    if not changes_sizes(settings):
        return config, pool_of(trace.header.info)
    sized = size_engine(located(config))
    return sized.config, pool_of(sized.info.to_dict())


def needed_times(
    namespace: argparse.Namespace, config: EngineConfig, trace: Trace | None = None
) -> StepTimeModel:
    """The step times, or an error that says how to get some."""
    times = step_times(namespace, config, trace)
    if times is None:
        raise ConfigError(
            f"nothing says how long steps take: run `quire calibrate {config.model.model}`, or "
            "give --step-times FILE, or --memory-gb-s and --gflops"
        )
    return times


def wanted_pace(name: str, trace: Trace, times: StepTimeModel) -> MachinePace | None:
    """What `--pace` says; `None`: the machine is always as fast.

    Raises:
        ConfigError: it is not known.
    """
    if name == "recorded":
        return recorded_pace(trace, times)
    if name == "usual":
        return None
    if (pace := calibrated_pace(times)) is None:
        raise ConfigError(
            "--pace calibrated: the step times do not say how fast the machine was in each second: "
            "measure them with `quire calibrate`"
        )
    return pace


def recorded_pace(trace: Trace, times: StepTimeModel) -> MachinePace:
    """How fast the machine was.

    Raises:
        ConfigError: no steps were recorded, or not from the engine's start on.
    """
    if not (trace.steps and trace.header.config):
        raise ConfigError("--pace recorded: the trace has no steps: record one with --record")
    recorded = recorded_config(trace.header.config)
    engine = SimulatedEngine(trace, recorded, pool_of(trace.header.info))
    return measured_pace(Lockstep(trace, engine), times)


def simulate(
    trace: Trace,
    config: EngineConfig,
    pool: Pool,
    times: StepTimeModel,
    records: StepRecords | None = None,
    pace: MachinePace | None = None,
    progress: CommandProgress | None = None,
) -> SimulatedRun:
    """Run a trace; `progress` is told of requests that came."""
    total = sum(request.output_len for request in trace.requests)
    observe = None
    if records is not None:
        records.begin_core(1)

        def observe(stats: Any) -> None:
            records.record(stats, None)

    simulator = Simulator(
        config, pool, times, keep_token_times=total <= MOST_TOKEN_TIMES, observe=observe,
        pace=None if pace is None else pace.takes,
    )  # fmt: skip
    sequences = Sequences(trace.requests, trace.header.block_size)
    requests: Iterable[TraceRequest] = trace.by_arrival()
    if progress is not None:
        requests = progress.through("requests", requests, len(trace.requests))
    return simulator.run(requests, sequences)


def _report(
    namespace: argparse.Namespace,
    trace: Trace,
    settings: dict[str, Any],
    times: StepTimeModel,
    pace: MachinePace | None,
    done: tuple[SimulatedRun, dict[str, Any]],
) -> None:
    from quire.bench.report import ReportRun, write_report

    name = " ".join(f"{key}={value}" for key, value in settings.items()) or "as it is"
    runs = [ReportRun(name, done[1], records_of_run(done[0]))]
    if settings:
        config, pool = scenario(namespace, trace, {})
        run = simulate(trace, config, pool, times, pace=pace)
        result = result_of(run, config, times, {}, namespace.trace)
        runs.insert(0, ReportRun("as it is", result, records_of_run(run)))
    notes = ("Simulated: the scheduler is the engine's, the times of steps are a model's.",)
    write_report(namespace.report, f"Simulation of {Path(namespace.trace).name}", runs, notes=notes)
    print(f"wrote {namespace.report}")


def records_of_run(run: SimulatedRun) -> list[RequestRecord]:
    """What each request did, in the schema of the benchmarks."""
    records = []
    for index, start in enumerate(run.arrivals):
        first, times = run.first_tokens[index], run.token_times[index] if run.token_times else ()
        itls = [b - a for a, b in zip(times, times[1:], strict=False)]
        records.append(
            RequestRecord(
                start,
                run.prompt_lens[index],
                run.output_lens[index],
                None if math.isnan(first) else first,
                itls,
                run.ends[index],
            )
        )
    return records


def result_of(
    run: SimulatedRun,
    config: EngineConfig,
    times: StepTimeModel,
    settings: dict[str, Any],
    trace: str,
) -> dict[str, Any]:
    """The result, in the schema of the benchmarks."""
    asked = RunSettings(
        config.model.names[0],
        "simulator",
        num_prompts=len(run) + run.num_refused,
        metadata={
            "date": f"{now():%Y%m%d-%H%M%S}",
            "trace": str(trace),
            "settings": settings,
            "step_times": times.about,
            "steps": run.num_steps,
            "preemptions": run.num_preemptions,
            "refused": run.num_refused,
            "busy_seconds": run.busy_seconds,
            "cached_tokens": sum(run.cached_tokens),
        },
    )
    return asked.to_json() | summary(records_of_run(run), run.duration, percentiles=(50, 90, 99))


def told(run: SimulatedRun, took: float) -> str:
    """What only a simulation can tell."""
    return (
        f"{run.num_steps} steps, {run.num_preemptions} preemptions, {run.num_refused} refused, "
        f"{sum(run.cached_tokens):,} prompt tokens from the prefix cache; "
        f"{run.duration:.1f} s simulated in {took:.2f} s, {run.duration / max(took, 1e-9):.0f} x "
        "real time"
    )


def write_json(path: str | Path, data: Any, flag: str) -> None:
    """Write a file that was asked for.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(data), "utf-8")
    except OSError as error:
        raise ConfigError(f"{flag}: cannot write {str(path)!r}: {error.strerror}") from None
    print(f"wrote {path}")


def _result_file(namespace: argparse.Namespace) -> str:
    return namespace.result_filename or f"simulated-{now():%Y%m%d-%H%M%S}.json"
