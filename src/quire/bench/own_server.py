"""A server for one measurement: `quire serve` in a process of its own, ended with the block."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import IO, Any, Final

from quire.errors import StartupError
from quire.utils.process import terminate

POLL_SECONDS: Final = 0.1
GRACE_SECONDS: Final = 20.0
LAST_LINES: Final = 5


@contextlib.contextmanager
def own_server(arguments: list[str], patience: float = 600.0) -> Iterator[str]:
    """The URL of a server that is ready, while the block runs.

    Args:
        arguments: Of `quire serve`, without a port.
        patience: Seconds until it must be ready.

    Raises:
        StartupError: it ended, or was not ready in time; with the end of what it printed.
    """
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", *arguments, "--port", str(port)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(process, url, log, patience)
            yield url
        finally:
            terminate(process, GRACE_SECONDS)


def free_port() -> int:
    """A port that nobody listened on just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_ready(process: subprocess.Popen[Any], url: str, log: IO[bytes], patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        if process.poll() is not None:
            raise StartupError(f"the server ended with code {process.returncode}: {_last(log)}")
        if time.monotonic() > deadline:
            raise StartupError(f"the server was not ready within {patience:g} s: {_last(log)}")
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"{url}/readyz", timeout=10) as reply,
        ):
            if reply.status == 200:
                return
        time.sleep(POLL_SECONDS)


def _last(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return " | ".join(lines[-LAST_LINES:]) or "it printed nothing"
