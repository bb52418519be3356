"""The socket a server listens on, bound before anything else, so that a taken port is told at once
and not after loading a model. Knows no HTTP.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from quire.config import ServerConfig
from quire.errors import StartupError


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket.

    Raises:
        StartupError: the address is taken, not ours, or not allowed.
    """
    if config.uds:
        return _bind_unix(config.uds)
    where = f"port {config.port} on {config.host}"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartupError(f"--host {config.host} is not an address: {error.strerror}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {where}: {_remedy(error)}") from None
    return listener


def _remedy(error: OSError) -> str:
    return {
        errno.EADDRINUSE: "it is in use; stop what listens there, or choose another with --port "
        "(0 picks a free one)",
        errno.EACCES: "that needs privileges; choose a --port of at least 1024",
        errno.EADDRNOTAVAIL: "this machine does not have that address; choose another --host",
    }.get(error.errno or 0, error.strerror or "unknown reason")


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            _remove_stale(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket file of a server that no longer runs; leave everything else alone."""
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise OSError(errno.EEXIST, "the file exists and is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) == 0:
            raise OSError(errno.EADDRINUSE, "another server listens there; choose another path")
    os.unlink(path)


def release(listener: socket.socket, config: ServerConfig, keep_name: bool = False) -> None:
    """Close the socket, and remove its name if it has one; not if another process listens there."""
    listener.close()
    if config.uds and not keep_name:
        with contextlib.suppress(OSError):
            os.unlink(config.uds)
