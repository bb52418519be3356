"""The profiler that is started and stopped by hand; its traces open in Perfetto.

It records what runs in this process. Knows nothing of the model.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile

from quire import envs
from quire.errors import ConfigError, Conflict, QuireError
from quire.logger import get_logger
from quire.spelling import did_you_mean

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProfilerConfig:
    """What `--profiler-config` may say; names are vLLM's."""

    profiler: str = "torch"
    """`torch`, or `cuda`, which calls `cudaProfilerStart` for `nsys`."""
    torch_profiler_dir: str | None = None
    torch_profiler_with_stack: bool = False
    torch_profiler_record_shapes: bool = True
    torch_profiler_with_memory: bool = False
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = True
    delay_iterations: int = 0
    """Steps that pass before the recording begins."""
    max_iterations: int = 0
    """Number of steps after which it ends on its own; 0: no limit."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ProfilerConfig:
        """Read the flag; `with_stack` is short for `torch_profiler_with_stack`, and so on.

        Raises:
            ConfigError: a key is unknown, or a value is bad.
        """
        kinds = {field.name: type(field.default) for field in fields(cls)}
        kinds["torch_profiler_dir"] = str
        values: dict[str, Any] = {}
        for key, value in given.items():
            name = key if key in kinds else f"torch_profiler_{key}"
            if name not in kinds:
                hint = did_you_mean(key, kinds)
                raise ConfigError(f"--profiler-config: unknown key {key!r}{hint}")
            if type(value) is not kinds[name] or (kinds[name] is int and value < 0):
                what = kinds[name].__name__
                raise ConfigError(f"--profiler-config: {key} must be of type {what}, got {value!r}")
            values[name] = value
        if values.get("profiler", "torch") not in ("torch", "cuda"):
            raise ConfigError(
                f"--profiler-config: profiler must be torch or cuda, got {values['profiler']!r}"
            )
        return cls(**values)


def make_profiler(given: Mapping[str, Any], with_cuda: bool) -> TorchProfiler:
    """The profiler that the configuration asks for.

    Raises:
        ConfigError: the configuration is bad, or asks for CUDA where there is none.
    """
    config = ProfilerConfig.of(given)
    if config.profiler == "cuda":
        if not with_cuda:
            raise ConfigError("--profiler-config: profiler cuda needs a CUDA device")
        return CudaProfiler(config, with_cuda)
    return TorchProfiler(config, with_cuda)


class TorchProfiler:
    """Writes one Chrome trace per start and stop.

    Args:
        config: What to record, and where to write it.
        with_cuda: Record GPU kernels, too.
    """

    def __init__(self, config: ProfilerConfig, with_cuda: bool) -> None:
        self._config = config
        self._activities = [ProfilerActivity.CPU]
        if with_cuda:
            self._activities.append(ProfilerActivity.CUDA)
        self._is_on = False
        self._running: profile | None = None
        self._steps = 0
        self._numbers = itertools.count(1)

    def start(self) -> None:
        """Begin to record, or to count the steps until recording begins.

        Raises:
            ConfigError: no folder is set, or it cannot be made.
            Conflict: a recording runs already, this profiler's or another's in this process.
        """
        self._check()
        if self._is_on:
            raise Conflict("the profiler is already running; stop it first")
        if not self._config.delay_iterations:
            self._begin()
        self._is_on, self._steps = True, 0

    def step(self) -> None:
        """A step is about to run. What goes wrong here is logged: it must not fail the step."""
        if not self._is_on:
            return
        first, most = self._config.delay_iterations, self._config.max_iterations
        if most and self._steps == first + most:
            self._unasked(self._end, "the profile is lost, it cannot be written")
        elif first and self._steps == first:
            self._unasked(self._begin, "there will be no profile")
        self._steps += 1

    def stop(self) -> None:
        """End the recording and write it.

        Raises:
            Conflict: no recording runs, or another profiler has ended it.
        """
        if not self._is_on:
            raise Conflict("the profiler is not running; start it first")
        self._is_on = False
        self._end()

    def _unasked(self, do: Callable[[], None], failed: str) -> None:
        try:
            do()
        except (QuireError, OSError, RuntimeError) as error:
            logger.warning("%s: %s", failed, error)

    def _check(self) -> None:
        self._folder()

    def _begin(self) -> None:
        # A process has one recording: the second takes it from the first, and the process dies when
        # that one is written.
        if autograd_profiler._is_profiler_enabled:
            raise Conflict("another torch profiler is recording in this process; stop it first")
        config = self._config
        recording = profile(
            activities=self._activities,
            record_shapes=config.torch_profiler_record_shapes,
            with_stack=config.torch_profiler_with_stack,
            profile_memory=config.torch_profiler_with_memory,
            with_flops=config.torch_profiler_with_flops,
        )
        recording.start()
        self._running = recording

    def _end(self) -> None:
        if self._running is None:
            return
        recorded, self._running = self._running, None
        if not autograd_profiler._is_profiler_enabled:
            raise Conflict("another torch profiler in this process has ended the recording")
        recorded.stop()
        suffix = ".gz" if self._config.torch_profiler_use_gzip else ""
        name = f"quire-{os.getpid()}-{next(self._numbers)}.pt.trace.json{suffix}"
        path = self._folder() / name
        recorded.export_chrome_trace(str(path))
        logger.info("profile written to %s", path)

    def _folder(self) -> Path:
        name = self._config.torch_profiler_dir or envs.TORCH_PROFILER_DIR
        if not name:
            raise ConfigError(
                "no profiler is configured: set QUIRE_TORCH_PROFILER_DIR (or "
                "VLLM_TORCH_PROFILER_DIR) to the folder that traces should go to, or "
                "--profiler-config '{\"torch_profiler_dir\": ...}', before the engine starts"
            )
        folder = Path(name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the profiler's folder {name}: {error.strerror}") from None
        return folder


class CudaProfiler(TorchProfiler):
    """Marks a range for `nsys profile --capture-range=cudaProfilerApi`; writes nothing itself."""

    def _check(self) -> None:
        """Checks nothing: this profiler needs no folder."""

    def _begin(self) -> None:
        torch.cuda.cudart().cudaProfilerStart()

    def _end(self) -> None:
        torch.cuda.cudart().cudaProfilerStop()
