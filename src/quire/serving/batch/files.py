"""Where the lines of a batch come from and where its results go: files, or http(s) URLs.

URLs are read with GET and written with PUT, as vLLM does. Lines are read as they are needed.
"""

from __future__ import annotations

import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import urlsplit

from quire.errors import ConfigError, EngineError

READ_SECONDS: Final = 60.0
UPLOAD_SECONDS: Final = 1000.0
UPLOADS: Final = 5
"""Tries to upload a result."""
PAUSE_SECONDS: Final = 5.0
"""Between two of them."""
BOM: Final = b"\xef\xbb\xbf"


def is_url(where: str) -> bool:
    """Whether it is a URL, and not a path."""
    return where.startswith(("http://", "https://"))


def shown(where: str) -> str:
    """For messages: URLs may hold keys before the host and in the query."""
    if not is_url(where):
        return where
    parts = urlsplit(where)
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"


@contextlib.contextmanager
def open_input(where: str) -> Iterator[BinaryIO]:
    """A file or URL to read.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        if is_url(where):
            opened = urllib.request.urlopen(where, timeout=READ_SECONDS)
        else:
            opened = open(where, "rb")  # noqa: SIM115 -- closed below
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{shown(where)} answers with status {error.code}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(f"{shown(where)} cannot be read: {_reason(error)}") from None
    with opened:
        yield opened


def read_lines(file: BinaryIO, where: str, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines that are not empty, with their numbers from 1; `None` stands for one that is longer
    than `limit` bytes, of which nothing is kept.

    Raises:
        ConfigError: reading fails in the middle.
    """
    number = 0
    try:
        while line := file.readline(limit + 2):
            number += 1
            too_long = len(line) > limit + 1 or (len(line) > limit and not line.endswith(b"\n"))
            while too_long and not line.endswith(b"\n") and (more := file.readline(limit)):
                line = more
            line = line.removeprefix(BOM) if number == 1 else line
            if too_long:
                yield number, None
            elif line.strip():
                yield number, line.strip()
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(
            f"{shown(where)} broke off after line {number}: {_reason(error)}"
        ) from None


def count_lines(where: str) -> int | None:
    """Lines of a file that are not empty; `None` of a URL, which is read only once.

    Raises:
        ConfigError: it cannot be read.
    """
    if is_url(where):
        return None
    with open_input(where) as file:
        return sum(1 for _ in read_lines(file, where, 2**16))


def upload(path: Path, url: str, sleep: Callable[[float], None] = time.sleep) -> None:
    """Put a file where a URL says.

    Raises:
        EngineError: five tries failed; the last reason.
    """
    why = ""
    for left in range(UPLOADS - 1, -1, -1):
        try:
            with open(path, "rb") as file:
                size = path.stat().st_size
                headers = {"Content-Length": str(size), "Content-Type": "application/jsonl"}
                request = urllib.request.Request(url, file, headers, method="PUT")
                with urllib.request.urlopen(request, timeout=UPLOAD_SECONDS):
                    return
        except urllib.error.HTTPError as error:
            why = f"status {error.code}"
        except (OSError, HTTPException, ValueError) as error:
            why = _reason(error)
        if left:
            sleep(PAUSE_SECONDS)
    raise EngineError(f"{shown(url)} does not take the result ({why}); it is in {path}")


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
