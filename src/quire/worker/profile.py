"""A torch profiler that is started and stopped by hand; its traces open in Perfetto.

It sees what runs in this process. Knows nothing of the model.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from quire import envs
from quire.errors import ConfigError
from quire.logger import get_logger

logger = get_logger(__name__)


class TorchProfiler:
    """Writes one Chrome trace per start and stop into `QUIRE_TORCH_PROFILER_DIR`.

    Args:
        with_cuda: Record GPU kernels, too.
    """

    def __init__(self, with_cuda: bool) -> None:
        self._activities = [ProfilerActivity.CPU]
        if with_cuda:
            self._activities.append(ProfilerActivity.CUDA)
        self._running: profile | None = None
        self._numbers = itertools.count(1)

    def start(self) -> None:
        """Begin to record.

        Raises:
            ConfigError: no folder is set, it cannot be made, or a recording runs already.
        """
        _folder()
        if self._running is not None:
            raise ConfigError("the profiler is already running; stop it first")
        self._running = profile(activities=self._activities, record_shapes=True)
        self._running.start()

    def stop(self) -> Path:
        """End the recording and write it.

        Returns:
            The trace file.

        Raises:
            ConfigError: no recording runs.
        """
        if self._running is None:
            raise ConfigError("the profiler is not running; start it first")
        recorded, self._running = self._running, None
        recorded.stop()
        path = _folder() / f"quire-{os.getpid()}-{next(self._numbers)}.pt.trace.json.gz"
        recorded.export_chrome_trace(str(path))
        logger.info("profile written to %s", path)
        return path


def _folder() -> Path:
    name = envs.TORCH_PROFILER_DIR
    if not name:
        raise ConfigError(
            "set QUIRE_TORCH_PROFILER_DIR (or VLLM_TORCH_PROFILER_DIR) to the folder that traces "
            "should go to, before the engine starts"
        )
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"QUIRE_TORCH_PROFILER_DIR={name}: {error.strerror}") from None
    return folder
