"""The folder of journal files: who may use it, and which file belongs to a process that lives.

One process owns the folder by a lock on `lock`; a second one is refused, unless it is about to take
the first one's place. Every process writes a file of its own and holds a lock on it, so that a file
without one is that of a process that has ended. Locks are `flock`: the kernel drops them with the
process. Knows no format.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Final

from quire.errors import StartupError

SUFFIX: Final = ".journal"


class JournalFolder:
    """A folder that is this process's, or will be.

    Args:
        path: Made, with mode 0700, if it does not exist.
        waits: Whether this process may begin while another one owns the folder.

    Raises:
        StartupError: the folder cannot be used, others may write to it, or a process owns it.
    """

    def __init__(self, path: str, waits: bool) -> None:
        self.path = Path(path)
        flag = f"--journal-dir {path}"
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            found = os.stat(self.path)
        except OSError as error:
            raise StartupError(f"{flag}: {error.strerror}") from None
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            mode = stat.S_IMODE(found.st_mode)
            raise StartupError(
                f"{flag} must belong to the user of the server and be writable for nobody else, "
                f"got mode {mode:o} of user {found.st_uid}: chmod 700 it"
            )
        try:
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(f"{flag}: {error.strerror}") from None
        self.is_owner = False
        if not self.acquire() and not waits:
            os.close(self._lock)
            raise StartupError(
                f"{flag} is in use by another server; give each one a folder of its own"
            )

    def acquire(self) -> bool:
        """Own the folder, if nobody does."""
        self.is_owner = self.is_owner or _lock(self._lock)
        return self.is_owner

    def create(self) -> tuple[Path, int]:
        """A new file, locked, and its descriptor.

        Raises:
            OSError: it cannot be made.
        """
        there = [path.name.partition("-")[0] for path in self.path.glob(f"*{SUFFIX}")]
        number = 1 + max((int(name) for name in there if name.isdecimal()), default=0)
        path = self.path / f"{number:08d}-{os.getpid()}{SUFFIX}"
        return path, self.replace(path)

    def replace(self, path: Path, data: bytes = b"") -> int:
        """A file of ours anew, locked before anybody sees it; its descriptor.

        Raises:
            OSError: it cannot be written; what was there stays.
        """
        beside = path.with_suffix(".new")
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if not _lock(fd):  # another process looks at it just now
                raise OSError(errno.EAGAIN, "locked by another process")
            write_all(fd, data)
            if data:
                os.fsync(fd)
            os.replace(beside, path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
        return fd

    def left_behind(self) -> list[Path]:
        """Files of processes that have ended, the oldest first. What they were about to write is
        removed."""
        found = []
        for path in sorted(self.path.iterdir()):
            if path.suffix in (SUFFIX, ".new") and not _is_locked(path):
                if path.suffix == SUFFIX:
                    found.append(path)
                else:
                    path.unlink(missing_ok=True)
        return found

    def others(self, own: Path | None) -> list[Path]:
        """Files of other processes, the oldest first; also of one that has just ended, because its
        streams are on their way.

        Args:
            own: This process's.
        """
        return [path for path in sorted(self.path.glob(f"*{SUFFIX}")) if path != own]

    def close(self) -> None:
        """Leave the folder to others."""
        os.close(self._lock)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it.

    Raises:
        OSError: not all of it could be written.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True  # gone, or not ours
    try:
        return not _lock(fd)
    finally:
        os.close(fd)
