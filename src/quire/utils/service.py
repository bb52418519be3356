"""Talks to the service manager that started this process, as sd_notify(3) does: one datagram of
`NAME=value` lines to the socket that `NOTIFY_SOCKET` names.

systemd listens there for a unit of `Type=notify`; podman and others do too. Without the variable
nothing is sent. Knows nothing of servers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from quire.logger import get_logger

logger = get_logger(__name__)


class ServiceManager:
    """The service manager of this process, if there is one.

    Takes its variables out of the environment: they are for this process, and a child that had them
    could speak in its name.

    Args:
        environ: Environment variables; those of the process unless given.
    """

    def __init__(self, environ: MutableMapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._address = _address(environ.pop("NOTIFY_SOCKET", ""))
        self.watchdog_seconds = _watchdog(environ)
        """Seconds within which it wants to hear `WATCHDOG=1`, again and again; `None`: never."""

    @property
    def listens(self) -> bool:
        """Whether anybody wants to be told."""
        return self._address is not None

    def leave(self) -> None:
        """Tell nothing from now on: another process speaks for the service."""
        self._address = self.watchdog_seconds = None

    def tell(self, **fields: str | int) -> None:
        """Send fields, such as `READY=1`. What cannot be sent is lost: that is no reason not to
        serve."""
        if self._address is None:
            return
        text = "".join(f"{name}={_one_line(value)}\n" for name, value in fields.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.setblocking(False)
                out.sendto(text.encode(), self._address)
        except OSError as error:
            logger.warning("the service manager could not be told: %s", error.strerror or error)


def _one_line(value: str | int) -> str:
    return " ".join(str(value).split())


def _address(given: str) -> str | None:
    """As the socket module takes it; a leading `@` means the abstract name space of Linux."""
    if not given:
        return None
    if given[0] not in "@/":
        logger.warning("NOTIFY_SOCKET must begin with / or @, got %r; nothing is told", given)
        return None
    return "\0" + given[1:] if given[0] == "@" else given


def _watchdog(environ: MutableMapping[str, str]) -> float | None:
    """As sd_watchdog_enabled(3): for this process only if `WATCHDOG_PID` does not name another."""
    interval, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
    if not interval.isdecimal() or int(interval) == 0 or pid not in ("", str(os.getpid())):
        return None
    return int(interval) / 1e6
