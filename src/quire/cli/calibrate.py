"""`quire calibrate MODEL`: measures how long steps take on this machine, for simulations."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quire.cli.benches.flags import check_writable
from quire.cli.parser import Parser
from quire.cli.times import calibration_file
from quire.config import EngineConfig
from quire.config.cli import add_engine_flags, engine_config
from quire.errors import ConfigError
from quire.sim.lockstep import fit_recorded
from quire.sim.scenario import pool_of, recorded_config
from quire.sim.step_time import FORGETTING, StepShape, StepTimeModel
from quire.workload.trace import Trace, read_trace

EPILOG = (
    "Run it while the machine does nothing else: what is measured is what simulations go by. With "
    "--from a recording is read instead, and no model is loaded."
)


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("calibrate", "Measure how long steps take on this machine.", epilog=EPILOG)
    parser.add_argument(
        "--out", metavar="FILE", default=None,
        help="Where to write it. Default: a file of this model and its types in "
        "~/.cache/quire/step-times, where other commands look.",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", metavar="N", type=float, default=60.0,
        help="How long to measure, loading not included. Default: 60.",
    )  # fmt: skip
    parser.add_argument(
        "--from", metavar="TRACE", default=None, dest="trace",
        help="Fit to the steps of a recording (`quire serve --record`) instead.",
    )  # fmt: skip
    parser.add_config_flag()
    add_engine_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Measure and write; returns the exit code."""
    namespace = build_parser().parse(arguments)
    if not 1 <= namespace.seconds <= 86_400:
        raise ConfigError(f"--seconds must be 1 to 86400, got {namespace.seconds:g}")
    from quire.config.locate import located

    trace = None if namespace.trace is None else _recording(namespace.trace)
    config = engine_config(namespace) if trace is None else _recorded(namespace, trace)
    config = config if namespace.out and trace else located(config)
    path = _place(namespace.out, config)
    if trace is None:
        model = _measured(config, namespace.seconds)
    else:
        model = _of_trace(trace, Path(namespace.trace).name)
    model.write(path)
    print(as_text(model))
    print(f"wrote {path}")
    return 0


def _place(out: str | None, config: EngineConfig) -> Path:
    """Where the file is to be; told before the work if it cannot be there.

    Raises:
        StartupError: it cannot, or the model has no `config.json`.
    """
    if out is not None:
        check_writable(out, "--out")
        return Path(out)
    path = calibration_file(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {str(path.parent)!r}: {error.strerror}; name a file with --out"
        ) from None
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"cannot write into {str(path.parent)!r}; name a file with --out")
    return path


def _recording(path: str) -> Trace:
    trace = read_trace(path)
    if not trace.header.config:
        raise ConfigError(f"--from: {path} is no recording: it has no configuration and no steps")
    return trace


def _recorded(namespace: argparse.Namespace, trace: Trace) -> EngineConfig:
    """What was recorded, with the model where the flags say that it is, if they do."""
    config = recorded_config(trace.header.config)
    if not hasattr(namespace, "model"):
        return config
    return replace(config, model=replace(config.model, model=namespace.model))


def _of_trace(trace: Trace, name: str) -> StepTimeModel:
    config = recorded_config(trace.header.config)
    about = {"source": f"the steps of {name}", "steps": len(trace.steps)}
    return fit_recorded(trace, config, pool_of(trace.header.info), about)


def _measured(config: EngineConfig, seconds: float) -> StepTimeModel:
    from quire.engine.calibration import Calibration

    return Calibration(config, seconds, _tell).run()


def _tell(what: str, share: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{share:4.0%} {what:<40}", end="", file=sys.stderr, flush=True)
        if share >= 0.95:
            print(file=sys.stderr)


def as_text(model: StepTimeModel) -> str:
    """What the model says of some steps, for people."""
    about = dict(model.about)
    if isinstance(error := about.get("median_error"), float):
        about["median_error"] = f"{error:.1%} of a step"
    lines = [f"{name.replace('_', ' '):<20}{value}" for name, value in about.items()]
    context, root = 32 * 256, math.sqrt(512)
    for what, shape in (
        ("1 decode", StepShape(1, 1, 0, 256, 0)),
        ("8 decodes", StepShape(8, 8, 0, 8 * 256, 0)),
        ("32 decodes", StepShape(32, 32, 0, context, 0)),
        ("a prompt of 512", StepShape(512, 1, 1, 0, 512 * 513 // 2)),
        ("32 decodes after it", StepShape(32, 32, 0, context, 0, root, displaced=root * context)),
    ):
        lines.append(f"{what:<20}{1e3 * model.seconds(shape):.3f} ms")
    beside, second = model.overheads, math.log1p(1.0 / FORGETTING)
    for what, seconds in (
        ("between steps", beside.gap),
        ("way in, busy", beside.arrival),
        ("way in, asleep", beside.arrival + beside.wake),
        ("way out", beside.output),
        ("1 s idle: way in", beside.wake_per_idle * second),
        ("its step", model.per_idle * second),
        ("its way out", beside.output_per_idle * second),
    ):
        told = f"{1e3 * seconds:.3f} ms" if seconds else "none seen"
        lines.append(f"{what:<20}{told}")
    return "\n".join(lines)
