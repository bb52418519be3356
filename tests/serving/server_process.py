"""`serve_fake.py` in a process of its own, and what tests ask of it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from patience import PATIENCE, wait_for

SCRIPT = Path(__file__).parent / "serve_fake.py"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


class Process:
    """`serve_fake.py`, its output line by line."""

    def __init__(
        self,
        where: str,
        how: str,
        drain: float,
        env: dict[str, str] | None = None,
        *more: str,
    ) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, str(SCRIPT), where, how, str(drain), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def url(self) -> str:
        found = wait_for(lambda: re.search(r"ready at (https?://\S+)", self.output))
        return found.group(1)  # type: ignore[no-any-return]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    def go_on(self) -> None:
        """Let streams go on, or the engine die."""
        self.signal(signal.SIGUSR1)

    def end(self) -> int:
        code = self.popen.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code


@pytest.fixture
def serve() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def start(
        how: str = "well",
        where: str = "0",
        drain: float = 0.0,
        env: dict[str, str] | None = None,
        *more: str,
    ) -> Process:
        made.append(Process(where, how, drain, env, *more))
        return made[-1]

    yield start
    for process in made:
        process.popen.kill()
        process.popen.wait()
        process._reader.join(PATIENCE)
        assert process.popen.stdout is not None
        process.popen.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_up(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _stream(url: str, lines: list[str]) -> None:
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT, timeout=PATIENCE) as reply:
        lines += [line for line in reply.iter_lines() if line]


def start_stream(url: str) -> tuple[threading.Thread, list[str]]:
    lines: list[str] = []
    thread = threading.Thread(target=_stream, args=(url, lines))
    thread.start()
    return thread, lines


def busy(url: str) -> bool:
    return bool(httpx.get(f"{url}/load", timeout=PATIENCE).json()["server_load"])
