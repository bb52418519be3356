"""`quire keys add|list|revoke`: the keys of a server's `--api-key-file`.

Lines of others, comments too, stay as they are. A server that reads the file takes changes up
within a second.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from quire.cli.parser import Parser
from quire.config.key_file import (
    ROLES,
    KeyLine,
    check_limits,
    check_name,
    digest_of,
    parse,
    read_keys,
    read_time,
    shown_time,
    write_lines,
)
from quire.config.key_limits import KeyLimits, read_limits
from quire.errors import ConfigError
from quire.registry import Registry
from quire.spelling import did_you_mean

KEY_BYTES: Final = 32
"""Random bytes of a key."""
_PREFIX: Final = "sk-quire-"
"""What scanners for leaked keys find."""
_SPAN: Final = re.compile(r"(\d{1,6})([mhdw])")
_SECONDS: Final = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(
        "keys",
        "Add, list and revoke the keys of a server's --api-key-file.",
        epilog="Example: quire keys add search --file keys.txt --role user --expires 90d",
        intermixed=True,
    )
    # Optional for argparse only: a wrong flag is the better complaint when both are wrong.
    parser.add_argument(
        "action", nargs="?", metavar="ACTION", default=None, help="add, list or revoke."
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        default=None,
        help="Name of the key, unless all are listed.",
    )
    parser.add_argument("--file", metavar="FILE", default=None, help="The file of keys.")
    parser.add_argument(
        "--role", metavar="TEXT", default="user",
        help="What a new key is for: user, admin or metrics. Default: user.",
    )  # fmt: skip
    parser.add_argument(
        "--expires", metavar="TIME", default=None,
        help="When a new key ends: 2030-01-31, 2030-01-31T12:00:00Z, or a time from now such as "
        "90d (m, h, d, w). Default: never.",
    )  # fmt: skip
    parser.add_argument(
        "--limits", metavar="TEXT", default=None,
        help="What a new key may use, such as requests_per_minute=60,tokens_per_minute=100000,"
        "concurrent=8,queue_share=0.5. Default: as much as it likes.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", default=False, help="Print JSON.")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Do what is asked; returns the exit code."""
    given = build_parser().parse(arguments)
    if given.action not in _ACTIONS:
        hint = did_you_mean(given.action, _ACTIONS) if given.action else ""
        raise ConfigError(
            f"quire keys needs add, list or revoke{hint or ';'} see quire keys --help"
        )
    if given.file is None:
        raise ConfigError("which file of keys? Give --file")
    if (given.name is None) != (given.action == "list"):
        raise ConfigError(
            "quire keys list takes no name"
            if given.name
            else f"which key? quire keys {given.action} NAME"
        )
    path = Path(given.file)
    if given.action == "list":
        return _list(path, given)
    check_name(given.name)
    with _alone(path):
        return int(_ACTIONS.get(given.action)(path, given))


def _add(path: Path, given: Any) -> int:
    """Make a key and print it, which nobody can do again."""
    if given.role not in ROLES:
        raise ConfigError(f"--role must be one of {', '.join(ROLES)}, got {given.role!r}")
    limits = _limits(given.limits, given.role)
    lines, keys = _read(path) if path.exists() else ([], [])
    if any(key.name == given.name for key in keys):
        raise ConfigError(f"{str(path)!r} has a key {given.name!r} already: revoke it first")
    key = _PREFIX + secrets.token_urlsafe(KEY_BYTES)
    ends = _expiry(given.expires)
    made = KeyLine(given.name, digest_of(key.encode()), given.role, ends, limits)
    _write(path, [*lines, str(made)])
    print(json.dumps({**_told(made), "key": key}) if given.json else key)
    return 0


def _revoke(path: Path, given: Any) -> int:
    """Remove a key. A server does not take up a file without keys, so the last one stays, but has
    expired."""
    lines, keys = _read(path)
    names = [key.name for key in keys]
    if given.name not in names:
        raise ConfigError(
            f"{str(path)!r} has no key {given.name!r}{did_you_mean(given.name, names)}"
        )
    revoked = keys[names.index(given.name)]
    kept = [line for line in lines if _name_of(line) != given.name]
    if len(keys) == 1:
        kept.append(str(replace(revoked, expires=min(time.time(), revoked.expires or time.time()))))
    _write(path, kept)
    print(
        json.dumps({"name": given.name, "revoked": True}) if given.json else f"revoked {given.name}"
    )
    return 0


def _list(path: Path, given: Any) -> int:
    """Print all keys, of which nobody knows more than name and digest."""
    rows = [_told(key) for key in read_keys(path)]
    if given.json:
        print(json.dumps(rows, indent=2))
        return 0
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        state = f"{'expired' if row['expired'] else 'until'} {row['expires']}"
        ends = state if row["expires"] else "does not expire"
        limits = ",".join(f"{name}={value}" for name, value in row["limits"].items())
        print(f"{row['name']:<{width}}  {row['role']:<7}  {ends:<28}  {limits or 'no limits'}")
    return 0


_ACTIONS: Final[Registry[Callable[[Path, Any], int]]] = Registry(
    "action", {"add": _add, "list": _list, "revoke": _revoke}
)


def _told(key: KeyLine) -> dict[str, Any]:
    expires = None if key.expires is None else shown_time(key.expires)
    expired = key.expires is not None and key.expires <= time.time()
    return {
        "name": key.name,
        "role": key.role,
        "expires": expires,
        "expired": expired,
        "limits": key.limits.given(),
    }


def _limits(text: str | None, role: str) -> KeyLimits:
    """What a new key may use.

    Raises:
        ConfigError: a limit is not valid, or none can be for this role.
    """
    try:
        limits = read_limits(text or "")
        check_limits(limits, role)
    except ConfigError as error:
        raise ConfigError(f"--limits: {error.message}") from None
    return limits


def _expiry(text: str | None) -> float | None:
    """When a new key ends, in seconds since 1970.

    Raises:
        ConfigError: it is no time, or one that has passed.
    """
    if text is None:
        return None
    if span := _SPAN.fullmatch(text):
        return time.time() + int(span[1]) * _SECONDS[span[2]]
    try:
        when = read_time(text)
    except (ValueError, OverflowError):
        raise ConfigError(
            "--expires must be a date, a date with a time, or a time from now like 90d, "
            f"got {text!r}"
        ) from None
    if when <= time.time():
        raise ConfigError(f"--expires {text} has passed already")
    return when


def _read(path: Path) -> tuple[list[str], list[KeyLine]]:
    """The lines of the file, and the keys in them."""
    keys = read_keys(path)
    return path.read_text(encoding="utf-8").splitlines(), keys


def _name_of(line: str) -> str:
    line = line.strip()
    return "" if line.startswith("#") else line.partition(":")[0]


def _write(path: Path, lines: list[str]) -> None:
    parse("\n".join(lines))  # what is written can be read
    try:
        write_lines(path, lines)
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other of these commands changes a file of the same folder meanwhile, or a key of one of
    two that run at once would be lost."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"cannot use the folder of {str(path)!r}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
