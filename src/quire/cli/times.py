"""Where step times come from: a calibration, the trace itself, or the figures of a machine."""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.parser import Parser
from quire.config import EngineConfig
from quire.errors import ConfigError, StartupError
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
    """Where `quire calibrate` writes what it finds, unless told otherwise. Another shape of the
    model, dtype, quantisation, type of keys and values, or device has another file.

    Raises:
        ModelLoadError: the model's `config.json` cannot be read.
    """
    return _folder() / f"{_name(config)}-{_digest(config)}.json"


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "quire" / "step-times"


def _name(config: EngineConfig) -> str:
    return Path(config.model.model).name or "model"


def _digest(config: EngineConfig) -> str:
    """What step times depend on, beside the machine."""
    model, cache = config.model, config.cache
    shape = {
        name: value
        for name, value in model.read_shape().raw.items()
        if not name.startswith("_") and not name.endswith(("token_id", "_version"))
    }
    said = [
        shape, model.dtype, model.device, model.quantization, model.quantization_config,
        cache.kv_cache_dtype, cache.kv_cache_dtype_skip_layers,
    ]  # fmt: skip
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _calibrated(config: EngineConfig) -> StepTimeModel | None:
    """What `quire calibrate` found for this configuration, if it was run."""
    try:
        file = calibration_file(config)
    except StartupError:
        return None  # a recording of a model that is not on this machine
    if file.is_file():
        return StepTimeModel.read(file)
    pattern = f"{glob.escape(_name(config))}*.json"
    if others := sorted(_folder().glob(pattern)):
        print(
            f"not used: {others[0]} is of another model, dtype, quantisation, KV cache type or "
            "device, or of an older quire; --step-times takes it all the same",
            file=sys.stderr,
        )
    return None


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
    if (usual := _calibrated(config)) is not None:
        return usual
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
