"""`quire tune --slo ttft_p99=500ms,tpot_p99=50ms --trace T`: finds settings that meet targets."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench.slo import LatencyTargets
from quire.cli.benches.flags import check_writable
from quire.cli.many_simulations import ManySimulations, Simulation
from quire.cli.parser import Parser
from quire.cli.progress import CommandProgress
from quire.cli.simulate import needed_times, scenario
from quire.cli.times import WHERE, add_times_flags
from quire.config import EngineConfig
from quire.config.cli import add_engine_flags
from quire.errors import ConfigError
from quire.sim.simulator import Pool, Simulator
from quire.sim.step_time import StepTimeModel
from quire.workload.trace import Trace, TraceRequest, read_trace

if TYPE_CHECKING:
    from quire.bench.tune import Trial

EPILOG = (
    "The simulator tries the limits that can be changed while requests run, unless the present "
    "ones meet the targets; a live engine then plays the trace with the present settings and with "
    "the best others. The file that is written is for --config. The exit code is 0 if a verified "
    "setting meets the targets. " + WHERE
)

UNMET = "no setting that was tried meets the targets"


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("tune", "Find settings that meet latency targets.", epilog=EPILOG)
    parser.add_argument(
        "--slo", metavar="TARGETS", default=None,
        help="Such as ttft_p99=500ms,tpot_p99=50ms: mean or a percentile of ttft, tpot, itl, e2el.",
    )  # fmt: skip
    parser.add_argument("--trace", metavar="FILE", default=None, help="Requests to meet them with.")
    parser.add_argument(
        "--live", metavar="N", type=int, default=2,
        help="How many of the best settings run on a live engine; 0: none. Default: 2.",
    )  # fmt: skip
    parser.add_argument(
        "--live-seconds", metavar="N", type=float, default=60.0,
        help="How much of the trace they run: where the most tokens come. Default: 60.",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FILE", default="tuned.yaml",
        help="Where to write the settings. Default: tuned.yaml.",
    )  # fmt: skip
    add_times_flags(parser)
    parser.add_config_flag()
    add_engine_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Tune, print, write; returns 0 if a setting meets the targets, else 1."""
    namespace = build_parser().parse(arguments)
    if namespace.slo is None or namespace.trace is None:
        raise ConfigError("--slo TARGETS and --trace FILE are needed")
    targets = LatencyTargets.parse(namespace.slo)
    if not 0 <= namespace.live <= 20:
        raise ConfigError(f"--live must be 0 to 20, got {namespace.live}")
    if not namespace.live_seconds > 0:
        raise ConfigError(f"--live-seconds must be above 0, got {namespace.live_seconds:g}")
    check_writable(namespace.out, "--out")
    trace = read_trace(namespace.trace)
    config, pool = scenario(namespace, trace, {})
    times = needed_times(namespace, config, trace)

    from quire.bench.tune import busiest, tune, verify
    from quire.config.locate import located

    fitting = fitting_requests(config, pool, times, trace)
    requests = busiest(fitting, namespace.live_seconds)

    def play(trials: Sequence[Trial]) -> None:
        asyncio.run(verify(located(config), trials, requests, trace, targets, _tell))

    simulation = Simulation(trace, pool, times, targets.percentiles)
    with CommandProgress() as progress:
        simulate = ManySimulations(simulation, progress)
        own, best = tune(config, simulate, targets, play, namespace.live, _tell)
    chosen = _chosen(own, best)
    if namespace.live:
        print(f"live: {_part(requests, fitting)}")
    print(table(config, targets, [own, *best], chosen))
    met = (chosen.live_excess if namespace.live else chosen.excess) <= 1
    write(namespace.out, config, targets, own, chosen, namespace.trace, met)
    print(f"wrote {namespace.out}" + ("" if met else f"; {UNMET}"))
    return 0 if met else 1


def fitting_requests(
    config: EngineConfig, pool: Pool, times: StepTimeModel, trace: Trace
) -> list[TraceRequest]:
    """The requests that the simulator takes, as they come. Settings that are tried change nothing
    in that; the others would count as failed on the live engine, whatever the settings.

    Raises:
        ConfigError: there are none.
    """
    simulator = Simulator(config, pool, times)
    fitting = [request for request in trace.by_arrival() if simulator.takes(request)]
    if not fitting:
        raise ConfigError(
            f"no prompt of the trace fits the context of {config.model.max_model_len} tokens and "
            "the KV cache: raise --max-model-len, or give another trace"
        )
    if left := len(trace.requests) - len(fitting):
        print(
            f"{left:,} of {len(trace.requests):,} requests are left out, simulated and live: their "
            "prompts do not fit the context or the KV cache"
        )
    return fitting


def _part(requests: Sequence[TraceRequest], fitting: Sequence[TraceRequest]) -> str:
    """Which part of those that fit some requests are, for people."""
    if len(requests) == len(fitting):
        return "the whole trace"
    return (
        f"the busiest {requests[-1].arrival:.0f} s of the trace, {len(requests):,} of "
        f"{len(fitting):,} requests"
    )


def _chosen(own: Trial, best: Sequence[Trial]) -> Trial:
    """The best of those that were verified; without a live engine, of those simulated."""
    if own.live is None:
        return min((own, *best), key=lambda trial: trial.rank)
    return min((own, *best), key=lambda trial: (max(1.0, trial.live_excess), trial.rank))


def table(
    config: EngineConfig, targets: LatencyTargets, trials: Sequence[Trial], chosen: Trial
) -> str:
    """The evidence, for people."""
    from quire.bench.tune import changed

    lines = ["targets: " + ", ".join(map(str, targets.targets))]
    for trial in trials:
        mark = "->" if trial is chosen else "  "
        lines.append(f"{mark} {changed(trial.settings, config)}")
        for what, result in (("simulated", trial.simulated), ("live", trial.live)):
            if result is not None:
                lines.append(f"     {what:<10}{_figures(targets, result)}")
    return "\n".join(lines)


def _figures(targets: LatencyTargets, result: dict[str, Any]) -> str:
    words = [f"{name} {value:.1f} ms" for name, value in targets.figures(result).items()]
    verdict = "met" if targets.excess(result) <= 1 else "missed"
    return ", ".join(words) + f", {result['output_throughput']:.0f} tok/s: {verdict}"


def write(
    path: str,
    config: EngineConfig,
    targets: LatencyTargets,
    own: Trial,
    chosen: Trial,
    trace: str,
    met: bool,
) -> None:
    """Write the settings as a file for `--config`, with the evidence as comments.

    Raises:
        ConfigError: it cannot be written.
    """
    lines = [f"# quire tune, trace {Path(trace).name}"]
    lines += [
        f"# {line}" for line in table(config, targets, _distinct(own, chosen), chosen).splitlines()
    ]
    if not met:
        lines.append(f"# {UNMET}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in chosen.settings.items()]
    try:
        Path(path).write_text("\n".join(lines) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"--out: cannot write {path!r}: {error.strerror}") from None


def _distinct(own: Trial, chosen: Trial) -> list[Trial]:
    return [own] if own is chosen else [own, chosen]


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
