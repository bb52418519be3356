"""Where step times come from: a calibration, the trace itself, or the figures of a machine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.parser import Parser
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.sim.lockstep import fit_recorded
from quire.sim.scenario import pool_of, recorded_config
from quire.sim.step_time import StepTimeModel, roofline
from quire.workload.trace import Trace

if TYPE_CHECKING:
    from quire.executor.sizing import SizedEngine

WHERE = (
    "Step times come from --step-times, else from --memory-gb-s and --gflops, else from the file "
    "that `quire calibrate` wrote for this model, else from the steps in the trace."
)


def add_times_flags(parser: Parser) -> None:
    """Add the flags that `step_times` reads."""
    parser.add_argument(
        "--step-times", metavar="FILE", default=None, help="A file of `quire calibrate`."
    )
    parser.add_argument(
        "--memory-gb-s", metavar="N", type=float, default=None,
        help="1e9 bytes per second that the machine reads from memory, for a roofline model.",
    )  # fmt: skip
    parser.add_argument(
        "--gflops", metavar="N", type=float, default=None,
        help="1e9 operations per second that it computes.",
    )  # fmt: skip


def calibration_file(config: EngineConfig) -> Path:
    """Where `quire calibrate` writes what it finds, unless told otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = Path(config.model.model).name or "model"
    return Path(base).expanduser() / "quire" / "step-times" / f"{name}.json"


def step_times(
    namespace: argparse.Namespace,
    config: EngineConfig,
    trace: Trace | None = None,
    sized: SizedEngine | None = None,
) -> StepTimeModel | None:
    """The model of step times that was asked for, or the best there is; `None`: there is none.

    Raises:
        ConfigError: a file cannot be read, or one of two figures is missing.
    """
    if namespace.step_times is not None:
        return StepTimeModel.read(namespace.step_times)
    if namespace.memory_gb_s is not None or namespace.gflops is not None:
        return _roofline(namespace, config, sized)
    if (usual := calibration_file(config)).is_file():
        return StepTimeModel.read(usual)
    if trace is not None and trace.steps and trace.header.config:
        recorded = recorded_config(trace.header.config)
        about = {"source": "the steps of the trace"}
        return fit_recorded(trace, recorded, pool_of(trace.header.info), about)
    return None


def _roofline(
    namespace: argparse.Namespace, config: EngineConfig, sized: SizedEngine | None
) -> StepTimeModel:
    for flag, value in (("--memory-gb-s", namespace.memory_gb_s), ("--gflops", namespace.gflops)):
        if value is None:
            raise ConfigError(
                f"a roofline model needs --memory-gb-s and --gflops; {flag} is missing"
            )
    from quire.config.locate import located
    from quire.executor.sizing import size_engine
    from quire.weights.count import count_weights

    model = config.model
    shape = model.read_shape()
    sized = sized or size_engine(located(config))
    return roofline(
        weight_bytes=sized.info.weight_bytes,
        parameters=count_weights(model.folder, model.load_format, shape),
        kv_bytes_per_token=round(sized.kv_bytes_per_token),
        attention_flops_per_token=4.0 * shape.num_layers * shape.num_heads * shape.head_dim,
        memory_gb_per_second=namespace.memory_gb_s,
        gflops=namespace.gflops,
    )
