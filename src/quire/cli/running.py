"""Flags of the commands that ask a running server, and the client they make."""

from __future__ import annotations

import argparse

from quire.cli.http import Client
from quire.cli.parser import Parser
from quire.errors import ConfigError

DEFAULT_PORT = 8000


def add_running_flags(parser: Parser) -> None:
    """Add `--url`, `--port` and `--api-key`."""
    group = parser.add_argument_group("Running server")
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
        help="Its key. Default: QUIRE_API_KEY.",
    )  # fmt: skip


def server_named(namespace: argparse.Namespace) -> bool:
    """Whether a server was given."""
    return hasattr(namespace, "url") or hasattr(namespace, "port")


def running_client(namespace: argparse.Namespace) -> Client:
    """A client of the server that the flags name.

    Raises:
        ConfigError: both `--url` and `--port` are given, or one is bad.
    """
    from quire import envs

    url, port = getattr(namespace, "url", None), getattr(namespace, "port", None)
    if url is not None and port is not None:
        raise ConfigError("--url and --port name a server each: give one")
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"--port must be from 1 to 65535, got {port}")
    key = getattr(namespace, "api_key", None) or envs.API_KEY
    return Client(url or f"http://127.0.0.1:{port or DEFAULT_PORT}", key)
