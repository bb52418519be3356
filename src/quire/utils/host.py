"""What this process may use of its machine: RAM and cores, within its control groups.

In a container its limit counts and not the size of the machine: a process that goes by the latter
is killed. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

NO_LIMIT: Final = 2**62
"""Version 1 of control groups writes none as a number of about twice this."""


class MemoryFiles(NamedTuple):
    """Where one control group tells of its memory."""

    limit: Path
    used: Path
    stat: Path
    droppable: str
    """The row of `stat` with the bytes of file cache that can be dropped."""

    def left(self) -> int | None:
        """Bytes that can still be allocated; `None` if the group has no limit."""
        limit = _number(self.limit)
        if limit is None or limit >= NO_LIMIT:
            return None
        used = _number(self.used)
        return None if used is None else limit - used + _stat(self.stat, self.droppable)


def _least(files: Iterable[MemoryFiles]) -> int | None:
    left = [found for group in files if (found := group.left()) is not None]
    return max(0, min(left)) if left else None


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """Limits of this process's control groups, version 1 or 2, its own and all above it."""

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def memory_left(self) -> int | None:
        """Bytes that can still be allocated; file cache that can be dropped counts as free.

        `None` if no group has a limit.
        """
        return _least(self.memory_files())

    def memory_files(self) -> list[MemoryFiles]:
        """The files that tell it, of each group that may have a limit."""
        kinds = (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        )
        return [
            MemoryFiles(folder / limit, folder / used, folder / "memory.stat", row)
            for limit, used, row in kinds
            for folder in self._folders("memory")
            if (folder / limit).is_file()
        ]

    def cpu_quota(self) -> float | None:
        """The CPU quota in cores; `None` if no group has one."""
        shares = [share for folder in self._folders("cpu") if (share := _quota(folder))]
        return min(shares) if shares else None

    def oom_kills(self) -> int | None:
        """Number of processes of this group that the kernel's out-of-memory killer has ended so
        far.

        `None` if the count cannot be read.
        """
        for folder in self._folders("memory"):
            for name in ("memory.events", "memory.oom_control"):
                if (folder / name).is_file():
                    return _stat(folder / name, "oom_kill")
        return None

    def throttled(self) -> float | None:
        """Seconds so far in which a quota kept this process, or others of its group, from running.
        Of several groups, the one that was throttled longest counts. `None` if the count cannot be
        read."""
        found = []
        for folder in self._folders("cpu"):
            file = folder / "cpu.stat"
            if file.is_file():
                micros, nanos = _stat(file, "throttled_usec"), _stat(file, "throttled_time")
                found.append(micros / 1e6 + nanos / 1e9)
        return max(found, default=None)

    def _folders(self, controller: str) -> Iterator[Path]:
        """The process's group for a controller and all groups above it, as far as they are
        visible."""
        try:
            lines = self.membership.read_text("utf-8").splitlines()
        except OSError:
            return
        for line in lines:
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers and controller not in controllers.split(","):
                continue
            base = self.root / controller if controllers else self.root
            folder = base / path.strip("/")
            yield from (f for f in (folder, *folder.parents) if f.is_relative_to(base))


def _number(path: Path) -> int | None:
    """The number in a file; `None` if there is no such file or it says `max`."""
    try:
        text = path.read_text("utf-8").strip()
    except OSError:
        return None
    return int(text) if text.lstrip("-").isdigit() else None


def _stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return 0
    return next((int(v) for k, _, v in (line.partition(" ") for line in lines) if k == name), 0)


def _quota(folder: Path) -> float | None:
    """Quota divided by period: `cpu.max` (version 2) or `cpu.cfs_*_us` (version 1)."""
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    try:
        first, _, second = (folder / "cpu.max").read_text("utf-8").strip().partition(" ")
        if first != "max":
            quota, period = int(first), int(second)
    except (OSError, ValueError):
        pass
    return quota / period if quota and period and quota > 0 else None


def call_libc(name: str, *args: int) -> int | None:
    """Call a function of the C library that takes numbers, each as wide as a pointer, and gives an
    int; `None` if there is none of that name."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    function.restype = ctypes.c_int
    return int(function(*map(ctypes.c_size_t, args)))


def trim_heap() -> None:
    """Give the heap's pages that hold nothing back to the system, where the C library can."""
    call_libc("malloc_trim", 0)


def held_memory(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Bytes of RAM that a process holds; `None` if it has ended, or this is not Linux."""
    try:
        pages = int((proc / str(pid) / "statm").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") or None


class AvailableMemory:
    """Bytes of RAM this process can still allocate without swapping or being killed: made once, to
    be asked again and again."""

    def __init__(self, groups: ControlGroups | None = None) -> None:
        # Looking for them costs ten times as much as reading them.
        self._files = (groups or ControlGroups()).memory_files()

    def __call__(self) -> int:
        """Bytes, now."""
        import psutil

        free = int(psutil.virtual_memory().available)
        left = _least(self._files)
        return free if left is None else min(free, left)


def available_memory(groups: ControlGroups | None = None) -> int:
    """What `AvailableMemory` tells, once."""
    return AvailableMemory(groups)()


def available_cores(groups: ControlGroups | None = None) -> int:
    """Cores this process can keep busy: its affinity, or less by its control group's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = (groups or ControlGroups()).cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))
