"""Arguments of the commands that talk to a running server, and the client made from them."""

from __future__ import annotations

import argparse
from typing import Final

from quire.cli.http import Client
from quire.cli.parser import Parser
from quire.errors import ConfigError

DEFAULT_PORT = 8000
_SCHEMES: Final = ("http://", "https://")


def add_running_flags(parser: Parser) -> None:
    """Add the URL as an argument, `--url`, `--port` and `--api-key`."""
    group = parser.add_argument_group("Running server")
    group.add_argument(
        "server", metavar="URL", nargs="?", default=argparse.SUPPRESS, help="The same as --url."
    )
    group.add_argument(
        "--url", metavar="TEXT", default=argparse.SUPPRESS,
        help="The server. Default: http://127.0.0.1:8000.",
    )  # fmt: skip
    group.add_argument(
        "--port", metavar="N", type=int, default=argparse.SUPPRESS,
        help="A port of this machine, instead of --url.",
    )  # fmt: skip
    group.add_argument(
        "--api-key", metavar="TEXT", default=argparse.SUPPRESS,
        help="Its key. Default: QUIRE_ADMIN_API_KEY, else QUIRE_API_KEY.",
    )  # fmt: skip


def is_url(text: str | None) -> bool:
    """Whether an argument that could be something else is the URL of a server."""
    return text is not None and text.lower().startswith(_SCHEMES)


def server_named(namespace: argparse.Namespace) -> bool:
    """Whether a server was given."""
    return any(getattr(namespace, way, None) is not None for way in ("server", "url", "port"))


def running_client(namespace: argparse.Namespace) -> Client:
    """A client for the server that the flags name.

    Raises:
        ConfigError: two servers are given, or the URL is invalid.
    """
    ways = {"URL": "server", "--url": "url", "--port": "port"}
    given = [way for way, name in ways.items() if getattr(namespace, name, None) is not None]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} name a server each: give one")
    url = getattr(namespace, "server", None) or getattr(namespace, "url", None)
    port = getattr(namespace, "port", None)
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"--port must be from 1 to 65535, got {port}")
    key = key_for(namespace)
    return Client(url or f"http://127.0.0.1:{port or DEFAULT_PORT}", key)


def key_for(namespace: argparse.Namespace) -> str | None:
    """The key to send: most of what these commands ask, only operators may."""
    from quire import envs

    return getattr(namespace, "api_key", None) or envs.ADMIN_API_KEY or envs.API_KEY
