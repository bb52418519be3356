"""Nothing is left behind, whatever phase a signal meets the server in: no process, no zombie, no
file in /dev/shm or the folder for temporary files, no port."""

from __future__ import annotations

import os
import re
import signal
import uuid
from pathlib import Path

import httpx
import psutil
import pytest

from live_server import Server, serving
from patience import PATIENCE, wait_for
from test_signals import LONG, Request

MARK = "LEFTOVERS_OF"
SHARED = Path("/dev/shm")


def marked(mark: str) -> list[int]:
    """Processes that have inherited the mark, whoever their parent is by now."""
    found = []
    for pid in psutil.pids():
        try:
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:  # it has just ended
            continue
    return found


def mapped(pids: list[int]) -> set[Path]:
    """Files in /dev/shm that one of these processes has mapped."""
    names = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if str(SHARED) in line and "(deleted)" not in line:
                names.add(Path(line.split()[-1]))
    return names


def numbered(pids: list[int]) -> set[Path]:
    """Files in /dev/shm that carry the number of one of these processes in their names: the whole
    number, for other programs have files there, and 748 is no part of 5748's."""
    numbers = {str(pid) for pid in pids}
    return {path for path in SHARED.iterdir() if numbers & set(re.findall(r"\d+", path.name))}


def loading(server: Server) -> None:
    wait_for(psutil.Process(server.process.pid).children, "an engine core")


def idle(server: Server) -> None:
    assert httpx.get(f"{server.url}/readyz", timeout=PATIENCE).status_code == 200


def streaming(server: Server) -> Request:
    return Request(server.url, *LONG)


def draining(server: Server) -> Request:
    request = Request(server.url, *LONG)
    os.killpg(server.process.pid, signal.SIGTERM)
    wait_for(lambda: httpx.get(f"{server.url}/readyz", timeout=PATIENCE).status_code == 503)
    assert not request.finish
    return request


def with_spare(server: Server) -> None:
    """A core and a spare that is ready."""
    idle(server)
    wait_for(server.spare, "a spare core")


def spare_starts(server: Server) -> None:
    idle(server)
    wait_for(lambda: len(server.children()) == 2, "a spare core that is not ready")


def spare_promoted(server: Server) -> Request:
    """The core was killed, and the spare has taken over."""
    with_spare(server)
    request = streaming(server)
    core, spare = server.core(), server.spare()
    core.kill()
    wait_for(lambda: server.spare() is None or server.spare() != spare, "the spare at work")
    return request


SPARES = (with_spare, spare_starts, spare_promoted)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", [loading, idle, streaming, draining, *SPARES])
def test_nothing_is_left(phase, number: int, tmp_path: Path) -> None:
    """SIGKILL goes to the API process alone, the others to the whole group."""
    mark = uuid.uuid4().hex
    others = set(SHARED.iterdir())  # a process long gone may have had the number of one of ours
    env = {MARK: mark, "TMPDIR": str(tmp_path)}
    how = {"env": env, "own_group": True}
    flags = ["--warm-spare"] * (phase in SPARES)
    limit = "600" if phase is draining else "0"
    with serving("--shutdown-timeout", limit, *flags, **how) as server:
        request = phase(server)
        pids = marked(mark)
        assert len(pids) == 2 + (phase in (with_spare, spare_starts)) or phase is spare_promoted
        family = [psutil.Process(pid) for pid in pids]
        files = mapped(pids)
        if number == signal.SIGKILL:
            server.process.kill()
        else:
            os.killpg(server.process.pid, number)
        code = server.process.wait(PATIENCE)
        interrupted = phase is loading and number == signal.SIGINT
        assert code == (-number if number == signal.SIGKILL else 130 if interrupted else 0)
        # A zombie counts as a process here.
        assert not psutil.wait_procs(family, timeout=PATIENCE)[1]
        if request is not None:
            request.join()
            assert request.error and not request.finish, "no client takes it for complete"
    assert marked(mark) == []
    assert list(tmp_path.iterdir()) == []
    assert not {path for path in files if path.exists()}
    assert not numbered(pids) - others
    assert "Traceback" not in server.log
