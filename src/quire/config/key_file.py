"""The file of API keys: what a line says, reading the file, and replacing it in one piece.

A line is `name:sha256[:role[:options]]`. The file holds digests, never keys. Knows neither requests
nor what a role may do.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from quire.config.key_limits import KEY_LIMITS, READ_LIMIT, KeyLimits
from quire.errors import ConfigError

ROLES: Final = ("user", "admin", "metrics")
"""What a key may be for. `admin` includes the others."""
MAX_FILE_BYTES: Final = 2**20
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class KeyLine:
    """One key."""

    name: str
    """What logs, metrics and other callers' errors may tell of it."""
    digest: bytes
    """SHA-256 of the key."""
    role: str = "user"
    expires: float | None = None
    """Seconds since 1970 from which on the key is refused."""
    limits: KeyLimits = KeyLimits()
    """What its requests may use."""

    def __str__(self) -> str:
        """The line of the file."""
        line = f"{self.name}:{self.digest.hex()}:{self.role}"
        options = []
        if self.expires is not None:
            options.append(f"expires={shown_time(self.expires)}")
        if told := str(self.limits):
            options.append(told)
        return ":".join((line, ",".join(options))) if options else line


def digest_of(key: bytes) -> bytes:
    """What the file holds of a key. Keys are long and random, so a fast hash is enough."""
    return hashlib.sha256(key).digest()


def shown_time(seconds: float) -> str:
    """A time as the file has it, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_time(text: str) -> float:
    """Seconds since 1970 of an ISO date or time; UTC unless it says otherwise.

    Raises:
        ValueError: it is none.
    """
    when = datetime.fromisoformat(text)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {"expires": read_time, **READ_LIMIT}
"""Option to what reads its value, which raises `ValueError`, or says itself what is wrong."""


def check_name(name: str) -> str:
    """The name of a key.

    Raises:
        ConfigError: it cannot be one.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "a key's name must be 1 to 64 letters, digits, dots, dashes and underscores, and begin "
            f"with a letter or digit, got {name[:80]!r}"
        )
    return name


def check_limits(limits: KeyLimits, role: str) -> None:
    """Refuse limits that would mean nothing.

    Raises:
        ConfigError: a key of this role sends nothing that they could limit.
    """
    if role == "metrics" and limits.given():
        raise ConfigError("a key of the role metrics sends no requests that limits could be for")


def parse(text: str) -> list[KeyLine]:
    """The keys of a file's text.

    Raises:
        ConfigError: a line is wrong. It names the line by its number and shows nothing of it that
            could be a key, because keys are easily pasted where their digests belong.
    """
    found: list[KeyLine] = []
    seen: set[str | bytes] = set()
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            key = _parse_line(line)
            if {key.name, key.digest} & seen:
                raise ConfigError("the name or the digest of an earlier line is repeated")
        except ConfigError as error:
            raise ConfigError(f"line {number}: {error.message}") from None
        seen |= {key.name, key.digest}
        found.append(key)
    if not found:
        raise ConfigError("it holds no key")
    return found


def _parse_line(line: str) -> KeyLine:
    name, *rest = line.split(":", 3)
    if not rest:
        raise ConfigError("it must be name:sha256[:role[:options]]")
    digest, role, options = (*rest, *("", "user", "")[len(rest) :])
    if not _NAME.fullmatch(name):
        raise ConfigError("the name must be letters, digits, dots, dashes and underscores (64)")
    if not _DIGEST.fullmatch(digest):
        raise ConfigError("the second field must be the key's SHA-256, 64 hexadecimal digits")
    if role not in ROLES:
        raise ConfigError(f"the role must be one of {', '.join(ROLES)}")
    values: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        what, equals, value = option.partition("=")
        if what not in _OPTIONS or not equals or what in values:
            raise ConfigError(
                f"options are {', '.join(_OPTIONS)}, each at most once, as option=value"
            )
        try:
            values[what] = _OPTIONS[what](value)
        except ConfigError:
            raise
        except (ValueError, OverflowError):
            raise ConfigError(f"the value of {what} is not valid: {value[:40]!r}") from None
    limits = KeyLimits(**{name: values.pop(name) for name in KEY_LIMITS if name in values})
    check_limits(limits, role)
    return KeyLine(name, bytes.fromhex(digest), role, limits=limits, **values)


@dataclass(frozen=True, slots=True)
class FileState:
    """What changes when a file is written or replaced."""

    device: int
    inode: int
    size: int
    changed: int


def state_of(path: str | Path) -> FileState:
    """The state of a file; links are followed, as Kubernetes updates a secret by moving one.

    Raises:
        OSError: there is no such file.
    """
    told = os.stat(path)
    return FileState(told.st_dev, told.st_ino, told.st_size, told.st_mtime_ns)


def read_keys(path: str | Path) -> list[KeyLine]:
    """The keys of a file.

    Raises:
        ConfigError: it cannot be read, others may write to it, or a line is wrong.
    """
    try:
        with open(path, "rb") as file:
            told = os.fstat(file.fileno())
            if not stat.S_ISREG(told.st_mode):
                raise ConfigError(f"the key file {str(path)!r} is not a file")
            if told.st_mode & 0o002:
                raise ConfigError(
                    f"everybody may write to the key file {str(path)!r}: chmod 600 it"
                )
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {str(path)!r}: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"the key file {str(path)!r} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return parse(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"the key file {str(path)!r} is not UTF-8 text") from None
    except ConfigError as error:
        raise ConfigError(f"the key file {str(path)!r}: {error.message}") from None


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Replace the file in one piece, with mode 0600: a server that reads it sees the old keys or
    the new ones. A link stays one.

    Raises:
        OSError: it cannot be written; then it is as it was.
    """
    target = Path(os.path.realpath(path))
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:  # mkstemp gives mode 0600
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
