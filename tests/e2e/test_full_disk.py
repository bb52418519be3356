"""A full disk: serving goes on, with one warning from whoever cannot write."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from live_server import QUIRE
from patience import PATIENCE, wait_for
from quire.core.stats import StepStats
from quire.observability.metrics.tensorboard import TensorBoardSink
from quire.worker.profile import make_profiler

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
    except httpx.ConnectError:
        return False


def test_a_server_whose_log_and_output_cannot_be_written() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with FULL.open("wb") as full:
        server = subprocess.Popen(
            [*QUIRE, "serve", "--port", str(port), "--enable-log-requests"],
            stdout=full,
            stderr=full,
        )
    try:
        wait_for(lambda: is_up(url) or server.poll(), "a server that answers")
        body = {"prompt": "The capital of France is", "max_tokens": 4}
        for _ in range(3):
            assert (
                httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
            )
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    finally:
        server.kill()
        server.wait()


def test_function_traces() -> None:
    code = (
        "import sys\n"
        "from quire.utils import function_trace\n"
        "from quire.utils.math import human_bytes\n"
        "sys.settrace(function_trace._tracer(open('/dev/full', 'w', buffering=1)))\n"
        "print(human_bytes(1), human_bytes(2), sys.gettrace())\n"
        "import os; sys.stdout.flush(); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert done.stdout == "1 B 2 B None\n"
    assert done.stderr.count("nothing more is traced: No space left on device") == 1


def test_tensorboard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.observability.metrics.tensorboard.logger.propagate", True)
    sink = TensorBoardSink(str(tmp_path))
    assert sink._file is not None
    sink._file.close()
    sink._file = FULL.open("wb", buffering=0)
    for number in range(1, 4):
        sink.record(StepStats(step=number), None)
        sink._point()
    sink.close()
    assert warnings(caplog) == [
        "--tensorboard-dir: nothing more is written: No space left on device"
    ]


def test_a_profile_that_ends_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording that cannot be written costs a warning, not the step that it ends in."""
    monkeypatch.setattr("quire.worker.profile.logger.propagate", True)
    folder = tmp_path / "traces"
    config = {"torch_profiler_dir": str(folder), "max_iterations": 1, "use_gzip": False}
    profiler = make_profiler(config, with_cuda=False)
    profiler.start()
    folder.rmdir()
    os.symlink("/dev/full", folder)
    for _ in range(3):
        profiler.step()
    profiler.stop()
    (told,) = warnings(caplog)
    assert told.startswith("the profile is lost, it cannot be written")
