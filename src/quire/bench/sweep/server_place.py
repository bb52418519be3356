"""Where a load looks for its server, whether that will be there, and whether somebody is already.

A server that finds its port taken ends, and the load would measure whoever has it. Knows only the
flags of `serve` and of `bench serve` that say where the server is.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Final
from urllib.parse import urlsplit

HOST: Final = "127.0.0.1"
PORT: Final = 8000
CONNECT_SECONDS: Final = 1.0
FREE_SECONDS: Final = 3.0
"""What the server before this one gets to leave its port, if it was a child of its command."""
Place = tuple[str, int]


def place_of(words: Sequence[str]) -> Place | None:
    """Host and port that the command of a load asks; `None`: it does not say.

    Args:
        words: Of the command, with all parameters. Where a flag is there twice, the last counts.
    """
    said = _said(words, "--base-url", "--host", "--port")
    try:
        if url := said.get("--base-url"):
            parts = urlsplit(url if "//" in url else f"//{url}")
            usual = 443 if parts.scheme == "https" else 80
            return (parts.hostname, parts.port or usual) if parts.hostname else None
        if not said and ("bench", "serve") not in pairwise(words):
            return None  # another program, with defaults of its own
        return said.get("--host", HOST), int(said.get("--port", PORT))
    except ValueError:
        return None  # the load will say what is wrong with it


def port_of(words: Sequence[str]) -> int | None:
    """The port at which the command of a server listens; `None`: it does not say."""
    said = _said(words, "--port", "--config", "--uds")
    if "--port" in said:
        return int(said["--port"]) if said["--port"].isdecimal() else None
    # What a file says is not read, and other programs have defaults of their own.
    usual = any(PurePath(word).name in ("quire", "vllm") for word in words) and "serve" in words
    return PORT if usual and not said else None


def _said(words: Sequence[str], *flags: str) -> dict[str, str]:
    said = {}
    for word, following in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag in flags:
            said[flag] = value if equals else following
    return said


def is_here(place: Place) -> bool:
    """Whether it is this machine, by a name that says so."""
    return place[0] in ("localhost", "::1") or place[0].startswith("127.")


def is_taken(place: Place) -> bool:
    """Whether a server listens there, and still does `FREE_SECONDS` later."""
    deadline = time.monotonic() + FREE_SECONDS
    while _listens(place):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)
    return False


def _listens(place: Place) -> bool:
    try:
        with socket.create_connection(place, CONNECT_SECONDS):
            return True
    except (OSError, OverflowError, UnicodeError):
        return False
