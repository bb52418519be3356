"""Web pages as callers: which may read replies (CORS), and which may not even ask.

A browser lets any page send requests to any server, `localhost` included. A server with keys is
safe, because pages do not know them. One without keys on this machine's own address answers whoever
can reach it, and through a browser that would be every page that its user opens. So such a server
refuses what a browser says comes from another origin, and what was sent to a name that is not this
machine's: a page whose owner points its name at 127.0.0.1 has that name in `Host`. Knows headers
only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from quire.config import ServerConfig
from quire.errors import ForbiddenOrigin

EXPOSED: Final = (
    "x-request-id", "x-stream-id", "x-ignored-fields", "retry-after", "retry-after-ms",
)  # fmt: skip
"""Headers of replies that scripts of these pages can read."""
_LOOKED_AT: Final = frozenset((b"host", b"origin"))
Headers = Iterable[tuple[bytes, bytes]]


class OriginGuard:
    """Refuses requests of web pages that a server without keys must not serve.

    Args:
        config: Whose keys and address say whether there is anything to guard.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._is_on = not config.has_keys and config.is_loopback and config.uds is None
        self._hosts = {host.lower() for host in config.allowed_hosts}
        self._origins = frozenset(config.allowed_origins)

    def check(self, headers: Headers) -> None:
        """Let the caller pass, unless it is a page that must not.

        Raises:
            ForbiddenOrigin: naming the header and the flag that would allow it.
        """
        if not self._is_on:
            return
        given = {name: value.decode("latin-1") for name, value in headers if name in _LOOKED_AT}
        host, origin = given.get(b"host", ""), given.get(b"origin")
        if host and not self._is_ours(host):
            raise ForbiddenOrigin("host", host, "--allowed-hosts")
        if origin is None or "*" in self._origins or origin in self._origins:
            return
        if origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            raise ForbiddenOrigin("origin", origin, "--allowed-origins")

    def _is_ours(self, host: str) -> bool:
        """Whether a `Host` header names this machine, or what the operator allows."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name == "localhost" or name.endswith(".localhost") or name in self._hosts:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return "*" in self._hosts


def cors_layers(config: ServerConfig) -> list[Middleware]:
    """What lets the pages of `--allowed-origins` read replies; nothing if there are none."""
    if not config.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=EXPOSED,
        )
    ]
