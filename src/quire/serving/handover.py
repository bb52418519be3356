"""The next version of a server takes over the socket that this one listens on, while streams run.

Both are started with the same `--handover-socket`, a Unix socket on which the one that serves
answers. Whoever starts asks there first. If a server answers, the newcomer loads its model, gets
the listening socket as a file descriptor, accepts on it, and says so; only then does the other one
stop accepting. The kernel's queue of new connections belongs to the socket, so none is refused or
lost.

Lines of text, one question to a connection:

    newcomer: who                  server: I PID ADDRESS
    newcomer: take                 server: I PID ADDRESS, and the descriptor; or: no REASON
    newcomer: serving

Knows no HTTP and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from quire.config import ServerConfig
from quire.errors import StartupError
from quire.logger import get_logger

logger = get_logger(__name__)

ANSWER_SECONDS: Final = 10.0
"""Seconds that either side waits for the other's next line."""
_LINE: Final = 4096
_WHO, _TAKE, _SERVING = b"who\n", b"take\n", b"serving\n"


def address_of(listener: socket.socket) -> str:
    """Where a socket listens: `HOST:PORT`, or the path of a Unix socket."""
    name = listener.getsockname()
    return str(name) if listener.family == socket.AF_UNIX else f"{name[0]}:{name[1]}"


# ---- the newcomer --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Taken:
    """A listening socket that another server has handed over."""

    listener: socket.socket
    predecessor: int
    """Its process id."""
    _said_on: socket.socket

    def confirm(self) -> None:
        """Connections are accepted here now, so the predecessor can stop accepting."""
        with self._said_on, contextlib.suppress(OSError):
            self._said_on.sendall(_SERVING)


def has_predecessor(config: ServerConfig) -> bool:
    """Whether a server answers at `--handover-socket`.

    Raises:
        StartupError: one does, but it listens elsewhere, or belongs to somebody else.
    """
    if config.handover_socket is None or (door := _knock(config.handover_socket)) is None:
        return False
    with door:
        try:
            door.sendall(_WHO)
            said = door.recv(_LINE)
        except OSError:
            return False  # it is ending
    if not said:
        return False
    _, address = _read_name(said, config)
    _check_address(address, config)
    return True


def take_listener(config: ServerConfig) -> Taken | None:
    """The socket of the server that answers at `--handover-socket`; `None` if none does any more.
    Waits for up to `ANSWER_SECONDS`.

    Raises:
        StartupError: it refuses, or listens elsewhere.
    """
    assert config.handover_socket is not None
    if (door := _knock(config.handover_socket)) is None:
        return None
    fds: list[int] = []
    try:
        door.sendall(_TAKE)
        said, fds, _, _ = socket.recv_fds(door, _LINE, 1)
        if not said:
            door.close()
            return None
        pid, address = _read_name(said, config)
        _check_address(address, config)
        listener = socket.socket(fileno=fds.pop())
    except OSError as error:
        door.close()
        raise StartupError(_cannot(config, error.strerror or "no answer")) from None
    except StartupError:
        door.close()
        for fd in fds:
            os.close(fd)
        raise
    listener.setblocking(False)
    return Taken(listener, pid, door)


def _knock(path: str) -> socket.socket | None:
    """A connection to whoever answers there; `None` if nobody does.

    Raises:
        StartupError: another user's process does.
    """
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.settimeout(ANSWER_SECONDS)
    try:
        door.connect(path)
    except OSError as error:
        door.close()
        if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
            return None
        raise StartupError(f"--handover-socket {path}: {error.strerror or error}") from None
    if not _is_ours(door):
        door.close()
        raise StartupError(f"--handover-socket {path} belongs to a process of another user")
    return door


def _read_name(said: bytes, config: ServerConfig) -> tuple[int, str]:
    word, _, rest = said.decode("utf-8", "replace").strip().partition(" ")
    pid, _, address = rest.partition(" ")
    if word != "I" or not pid.isdecimal():
        raise StartupError(_cannot(config, rest if word == "no" else "it speaks something else"))
    return int(pid), address


def _check_address(address: str, config: ServerConfig) -> None:
    """Two servers with one `--handover-socket` must mean the same address."""
    wanted = config.uds or f":{config.port}"
    fits = address == wanted if config.uds else config.port == 0 or address.endswith(wanted)
    if not fits:
        own = f"--uds {config.uds}" if config.uds else f"--port {config.port}"
        raise StartupError(_cannot(config, f"it listens at {address}, but this one has {own}"))


def _cannot(config: ServerConfig, why: str) -> str:
    return f"the server at --handover-socket {config.handover_socket} was not replaced: {why}"


def _is_ours(peer: socket.socket) -> bool:
    """Whether the process at the other end is of the same user. Where the system cannot tell, the
    permissions of the socket's file decide."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.geteuid())


# ---- the server that is there --------------------------------------------------------------------


class HandoverPoint:
    """Answers at `--handover-socket` until the listening socket has been taken.

    Args:
        path: Of the Unix socket. A file that is there is replaced: nobody answers at it, or it is
            the predecessor's, which has nothing left to hand over.
        listener: What is handed over.
        why_not: Why it cannot be handed over now; `None` if it can.
        taken: Called with the successor's process id once it accepts connections.

    Raises:
        StartupError: the socket cannot be made there.
    """

    def __init__(
        self,
        path: str,
        listener: socket.socket,
        why_not: Callable[[], str | None],
        taken: Callable[[int], None],
    ) -> None:
        self._path = path
        self._listener = listener
        self._why_not = why_not
        self._taken = taken
        self._door = _listen(path)
        self._inode = os.stat(path).st_ino
        self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        """Answer nobody any more; remove the file unless it is a successor's by now."""
        self._task.cancel()
        self._door.close()
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            peer, _ = await loop.sock_accept(self._door)
            with peer:
                peer.setblocking(False)
                if not _is_ours(peer):
                    continue
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(ANSWER_SECONDS):
                        if await self._answer(peer):
                            return

    async def _answer(self, peer: socket.socket) -> bool:
        """Answer one question; whether the socket has been taken."""
        loop = asyncio.get_running_loop()
        asked = await loop.sock_recv(peer, _LINE)
        name = f"I {os.getpid()} {address_of(self._listener)}\n".encode()
        if asked == _WHO:
            await loop.sock_sendall(peer, name)
        elif asked == _TAKE and (why_not := self._why_not()):
            await loop.sock_sendall(peer, f"no {why_not}\n".encode())
        elif asked == _TAKE:
            socket.send_fds(peer, [name], [self._listener.fileno()])
            # If it ends instead, this server goes on as if nothing had been asked.
            if await loop.sock_recv(peer, _LINE) == _SERVING:
                self._taken(_pid_of(peer))
                return True
        return False


def _pid_of(peer: socket.socket) -> int:
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])


def _listen(path: str) -> socket.socket:
    """A listening Unix socket that is at its path at once, in the place of what was there."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    beside = f"{path}.{os.getpid()}"
    try:
        if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.EEXIST, "the file exists and is not a socket; choose another path")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        door.bind(beside)
        os.chmod(beside, 0o600)
        door.listen(8)
        os.replace(beside, path)
    except OSError as error:
        door.close()
        raise StartupError(
            f"cannot listen at --handover-socket {path}: {error.strerror or error}"
        ) from None
    door.setblocking(False)
    return door
