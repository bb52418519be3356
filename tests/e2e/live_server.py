"""`quire serve` in a process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil

from patience import PATIENCE, wait_for

QUIRE = [sys.executable, "-m", "quire"]


class Server:
    """`quire serve --port 0` in a process of its own.

    Args:
        args: Further flags.
        env: Further variables.
        own_group: Make it the head of a process group, so that the group can be signalled.
        ignored: A signal it inherits as ignored, as under `nohup`.
    """

    def __init__(
        self,
        *args: str,
        env: dict[str, str] | None = None,
        own_group: bool = False,
        ignored: signal.Signals | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [*(_ignoring(ignored) if ignored else ()), *QUIRE, "serve", "--port", "0", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
            process_group=0 if own_group else None,
        )
        self.lines: list[str] = []
        self._url: str | None = None
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            if found and self._url is None:
                self._url = found.group(0)
            if self._url and "curl" in line:
                self._ready.set()
        self._ready.set()

    @property
    def url(self) -> str:
        """Base URL, once the server is ready."""
        assert self._ready.wait(PATIENCE), "".join(self.lines)
        assert self._url is not None, "".join(self.lines)
        return self._url

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def family(self) -> list[psutil.Process]:
        """The API process and everything it started."""
        api = psutil.Process(self.process.pid)
        return [api, *api.children(recursive=True)]

    def children(self) -> list[psutil.Process]:
        """What the API process has started and has not ended."""
        found = psutil.Process(self.process.pid).children()
        return [child for child in found if child.status() != psutil.STATUS_ZOMBIE]

    def core(self) -> psutil.Process:
        """The engine core that is at work."""
        (core,) = (c for c in self.children() if title_of(c) == "quire::EngineCore")
        return core

    def spare(self) -> psutil.Process | None:
        """The spare core, once it is ready."""
        return next((c for c in self.children() if title_of(c) == "quire::SpareCore"), None)

    def metric(self, name: str) -> float:
        """Sum over the samples of a metric."""
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """The same for several, of one scrape."""
        lines = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text.splitlines()
        found = [[float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(n)] for n in names]
        assert all(found), f"not all of the metrics {names}"
        return [sum(values) for values in found]

    def wait_idle(self) -> None:
        """Wait until nothing runs and no KV block is held."""
        wait_for(self._is_idle, lambda: f"an idle server\n{self.log}")

    def _is_idle(self) -> bool:
        names = ("num_requests_running", "num_requests_waiting{", "kv_cache_usage_perc")
        return not any(self.metrics(*(f"vllm:{name}" for name in names)))

    def stop(self) -> int:
        """End it gently; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


def title_of(process: psutil.Process) -> str:
    """As `ps` shows it; empty if it has just ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def _ignoring(number: signal.Signals) -> list[str]:
    """Before a command: run it with this signal ignored."""
    code = "import os, signal, sys; signal.signal(int(sys.argv[1]), signal.SIG_IGN); "
    return [sys.executable, "-c", code + "os.execvp(sys.argv[2], sys.argv[2:])", str(int(number))]


@contextlib.contextmanager
def serving(*args: str, **how: Any) -> Iterator[Server]:
    """A server while the block runs; `how` as `Server` takes it."""
    server = Server(*args, **how)
    try:
        yield server
    finally:
        server.stop()
