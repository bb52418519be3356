"""A server for the drills: the embedded model, a port and a folder of its own, and a hook inside.

The hook (`core_hook.py`) makes the core die, raise or compute NaN for requests that ask for it, and
adds a route that runs the integrity check. It is installed as any plugin is; the product knows
nothing of it. What a server holds is measured from outside, through `/proc`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from live_server import QUIRE, Server, title_of
from patience import PATIENCE

HERE = Path(__file__).resolve().parent
ROUTE = "/chaos/integrity"
INFO = "quire_chaos-1.0.dist-info"


@dataclass(frozen=True)
class Held:
    """What the processes of a server hold while it is idle."""

    processes: int
    zombies: int
    threads: int
    fds: int
    rss_mib: float
    shm: frozenset[str]
    """Names in /dev/shm."""


@cache
def flags_there_are() -> str:
    """The help of `quire serve`: which mechanisms this version has is told by its flags."""
    asked = subprocess.run([*QUIRE, "serve", "--help"], capture_output=True, text=True)
    return asked.stdout


def has_flag(name: str) -> bool:
    """Whether `quire serve` takes it."""
    return f"{name} " in flags_there_are()


class ChaosServer(Server):
    """`Server` with the hook.

    Args:
        folder: Where the plugin's metadata is written.
        args: Further flags; `{folder}` in them stands for the folder, `{port}` for a free port.
    """

    def __init__(self, folder: Path, *args: str, **how: Any) -> None:
        info = folder / INFO
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quire-chaos\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[quire.plugins]\nroute.{ROUTE} = integrity_route:ROUTE\n"
        )
        path = os.pathsep.join([str(folder), str(HERE), os.environ.get("PYTHONPATH", "")])
        env = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | how.pop("env", {})
        self.shm_before = frozenset(os.listdir("/dev/shm"))
        hook = ("--scheduler-cls", "core_hook:HookedPolicy")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        flags = [f.replace("{folder}", str(folder)).replace("{port}", port) for f in args]
        self._again = (*hook, "--disable-uvicorn-access-log", *flags), env
        self._former: list[Server] = []
        super().__init__(*self._again[0], env=env, **how)

    def succeed(self) -> None:
        """Start another server with the same flags, which takes this one's place, and wait until
        it is ready. The former process is not waited for."""
        former = copy.copy(self)
        successor = Server(*self._again[0], env=self._again[1])
        assert successor.url == self.url, "it listens elsewhere"
        self._former.append(former)
        self.process, self.lines = successor.process, successor.lines
        self._reader = successor._reader

    @property
    def log(self) -> str:
        """Of all processes."""
        return "".join(line for server in (*self._former, self) for line in server.lines)

    def stop(self) -> int:
        """End it and its predecessors."""
        for former in self._former:
            Server.stop(former)
        return super().stop()

    def core(self) -> psutil.Process | None:
        """The engine-core process that is there; not a spare one, nor a compiler of grammars."""
        found = []
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                title = title_of(child)
                if "quire::EngineCore" in title:
                    return child
                if "cores.core_main" in title:
                    found.append(child)  # it has not named itself yet
        return found[0] if found else None

    def hurt_core(self, number: int = signal.SIGKILL) -> bool:
        """Send the core a signal; whether there was one."""
        core = self.core()
        with contextlib.suppress(psutil.Error):
            if core is not None:
                core.send_signal(number)
                return True
        return False

    def status(self, path: str) -> int:
        """Of a GET; 0 if nobody answers."""
        # Asked 30 times a second beside loads. `httpx.get` makes a TLS context each time, which
        # took a third of a core from the server.
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=5)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            return connection.getresponse().status
        except (OSError, HTTPException):
            return 0
        finally:
            connection.close()

    def until(self, path: str, status: int, seconds: float) -> float | None:
        """Seconds until a GET of the path replies with the status; `None` if it does not."""
        start = time.monotonic()
        while time.monotonic() < start + seconds:
            if self.status(path) == status:
                return time.monotonic() - start
            time.sleep(0.02)
        return None

    def integrity(self) -> dict[str, Any] | None:
        """What the engine's own check says; `None` if it failed or nobody answers."""
        with contextlib.suppress(httpx.HTTPError):
            reply = httpx.post(self.url + ROUTE, timeout=PATIENCE)
            if reply.status_code == 200:
                return dict(reply.json())
        return None

    def held(self) -> Held:
        """What its processes hold now."""
        found = self.family()
        rows = []
        zombies = 0
        for one in found:
            with contextlib.suppress(psutil.Error):
                if any(part in title_of(one) for part in COMES_AND_GOES):
                    continue
                if one.status() == psutil.STATUS_ZOMBIE:
                    zombies += 1
                    continue
                rows.append((one.num_threads(), one.num_fds(), one.memory_info().rss / 2**20))
        shm = self.held_shm()
        return Held(
            len(rows), zombies, sum(r[0] for r in rows), sum(r[1] for r in rows),
            sum(r[2] for r in rows), shm,
        )  # fmt: skip

    def held_shm(self) -> frozenset[str]:
        """Names in /dev/shm that were not there before the server was."""
        return frozenset(os.listdir("/dev/shm")) - self.shm_before

    def wait_quiet(self, seconds: float = 20) -> bool:
        """Wait until nothing is held for requests; whether that came."""
        return settled(lambda: (self.integrity() or {"running": 1})["running"] == 0, seconds)


COMES_AND_GOES = ("quire::Grammars", "structured.helper_process", "quire::Templates",
                  "tokenizer.template_process")  # fmt: skip
"""Titles of processes that exist from the first grammar or costly template on, and end when one
takes too long."""


def settled(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def chaos_server(*args: str, **how: Any) -> Iterator[ChaosServer]:
    """A server while the block runs; ended by force if it does not end itself."""
    with tempfile.TemporaryDirectory(prefix="quire-chaos-") as folder:
        server = ChaosServer(Path(folder), *args, **how)
        try:
            assert server.url
            yield server
        finally:
            family = []
            with contextlib.suppress(psutil.Error):
                family = server.family()
            for one in family:
                with contextlib.suppress(psutil.Error):
                    one.send_signal(signal.SIGCONT)
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
            try:
                server.process.wait(60)
            except subprocess.TimeoutExpired:
                print("the server did not end: killed", file=sys.stderr)
                for one in family:
                    with contextlib.suppress(psutil.Error):
                        one.kill()
            server.stop()
