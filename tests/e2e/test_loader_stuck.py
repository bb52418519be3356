"""A core that gets stuck while it loads: the first ends the start, and says why; a later one is
replaced, and requests go on."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from live_server import Server, serving, title_of
from patience import PATIENCE, wait_for
from slow_loader import FOLDER
from test_restart import Client, whole

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
HERE = str(Path(__file__).parent)
CHECK = ("--scheduler-cls", "slow_loader:Policy", "--core-stall-timeout", "0.5")


def server(folder: Path, *flags: str) -> AbstractContextManager[Server]:
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    cache = ("--kv-cache-memory-bytes", str(64 * 2**20))
    return serving(*CHECK, *cache, *flags, env={FOLDER: str(folder), "PYTHONPATH": path})


def told(made: Server) -> str:
    """Why it did not start."""
    begin = "quire serve: the engine core got stuck in its start"
    (line,) = (line for line in made.lines if line.startswith(begin))
    return line


def test_a_first_core_that_deadlocks_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "armed").touch()
    with server(tmp_path) as made:
        assert made.process.wait(PATIENCE) == 1
    assert "uses no processor" in told(made) and "slow_loader.py" in made.log, "its stacks"


def test_a_first_core_that_is_stopped_ends_the_start(tmp_path: Path) -> None:
    with server(tmp_path) as made:
        wait_for(lambda: [c for c in made.children() if "core_main" in title_of(c)])
        made.children()[0].send_signal(signal.SIGSTOP)
        assert made.process.wait(PATIENCE) == 1
    assert "its process is stopped by a signal" in told(made)


def test_a_later_core_that_deadlocks_is_replaced(tmp_path: Path) -> None:
    with server(tmp_path) as made:
        client = Client(made.url, "unseeded")
        wait_for(lambda: len(client.events) > 20)
        (tmp_path / "armed").touch()
        made.core().kill()
        client.join()
        assert client.is_done, client.said
        assert client.choices() == whole(made.url, client.body | {"seed": client.seed()})
        assert made.metric('quire:core_stalls_total{engine="0",kind="still"') == 1
        assert "is stuck (still) while it loads" in made.log and "slow_loader.py" in made.log
    assert made.process.returncode == 0
