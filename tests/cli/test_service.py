"""What a service manager is sent, read from a socket as systemd reads it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import PATIENCE
from quire.utils.service import ServiceManager


@pytest.fixture(params=["path", "abstract"])
def listening(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[socket.socket, str]]:
    """A socket, and its name as it stands in the variable."""
    name = str(tmp_path / "n") if request.param == "path" else f"@quire-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.settimeout(PATIENCE)
        there.bind(name.replace("@", "\0"))
        yield there, name


def test_fields_arrive_as_lines(listening: tuple[socket.socket, str]) -> None:
    there, name = listening
    environ = {"NOTIFY_SOCKET": name, "OTHER": "x"}
    manager = ServiceManager(environ)
    assert environ == {"OTHER": "x"}, "children do not speak in its name"
    assert manager.listens and manager.watchdog_seconds is None
    manager.tell(READY=1, STATUS="loading:\nREADY=1")
    assert there.recv(4096) == b"READY=1\nSTATUS=loading: READY=1\n"


def test_nobody_listens() -> None:
    manager = ServiceManager({})
    manager.tell(READY=1)
    assert not manager.listens


@pytest.mark.parametrize("name", ["/nowhere/s", "vsock:2:1234", "relative"])
def test_what_cannot_be_told_is_no_failure(name: str) -> None:
    ServiceManager({"NOTIFY_SOCKET": name}).tell(READY=1)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog(given: dict[str, str], seconds: float | None) -> None:
    assert ServiceManager(given).watchdog_seconds == seconds
    assert not given
