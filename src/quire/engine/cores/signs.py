"""What the kernel says of a process that shows no progress: stopped, computing, waiting or still.

Reads `/proc/PID` (proc_pid_stat(5)); elsewhere than on Linux nothing is known. Knows nothing of
what the process does.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TICKS: Final = os.sysconf("SC_CLK_TCK")
STILL_SHARE: Final = 0.05
"""Who uses no larger part of one processor does nothing."""
HELD: Final = frozenset("tX")
"""States of a process that somebody else holds: a debugger, or the kernel that is ending it."""


@dataclass(frozen=True, slots=True)
class Signs:
    """What happened since the look before. Times in seconds."""

    stopped: bool
    """By SIGSTOP or the like: no thread runs."""
    held: bool
    """By a debugger."""
    computed: float
    """Processor time of all threads."""
    waited: float
    """How long the thread that waited longest was ready to run and got no core."""
    loads: int
    """Pages that had to be read from a disk."""
    on_disk: bool
    """A thread waits for a disk right now, in a way that no signal interrupts."""
    read: int = 0
    """Bytes that it has read, from wherever, if it was looked at with its family."""

    def is_still(self, seconds: float) -> bool:
        """Whether in these seconds nothing of it moved, though nobody kept it from moving. Threads
        that wait for Python's lock wake up 200 times a second, to no end."""
        moved = max(self.computed, self.waited) > STILL_SHARE * seconds
        return not (self.held or self.loads or self.on_disk or self.read or moved)


class ProcessSigns:
    """Looks at one process again and again."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._folder = proc / str(pid)
        self._stolen_from = proc / "stat"
        self._before: tuple[float, int] | None = None
        # processor time and pages loaded
        self._waits: dict[str, int] = {}
        self._stolen = 0.0
        self._had_read: int | None = None
        self._family: dict[str, int] | None = None
        # ticks of each process that it has started, directly or not

    def look(self, closely: bool, family: bool = False) -> Signs | None:
        """What happened since the last look; `None` if that is not known, as at the first one.

        Args:
            closely: Look at each thread as well, which takes 10 microseconds each. Unless the look
                before was as close, nothing is known of waits.
            family: If it computes nothing itself, count what the processes that it has started
                compute as if it did, and see what it reads: whoever loads waits for compilers and
                files. It takes milliseconds, as there are processes.
        """
        try:
            line = (self._folder / "stat").read_bytes()
            fields = line.rpartition(b")")[2].split()
            state = fields[0].decode()
            now = (int(fields[11]) + int(fields[12])) / TICKS, int(fields[9])
        except (OSError, IndexError, ValueError):
            return None
        waited, on_disk = self._look_at_threads() if closely else (0.0, False)
        if not closely:
            self._waits.clear()
        before, self._before = self._before, now
        if before is None:
            return None
        theirs, read = 0.0, 0
        if not family or now[0] > before[0]:  # who computes itself need not be looked at
            self._family = self._had_read = None
        else:
            theirs, read = self._look_at_family()
        return Signs(
            state == "T", state in HELD, max(0.0, now[0] - before[0]) + theirs, waited,
            max(0, now[1] - before[1]), on_disk or state == "D", read,
        )  # fmt: skip

    def _look_at_family(self) -> tuple[float, int]:
        """Seconds that its descendants have computed since the last such look, and bytes that it
        has read."""
        had, self._had_read = self._had_read, _bytes_read(self._folder)
        before, self._family = self._family, self.descendants()
        ticks = 0
        if before is not None:
            ticks = sum(max(0, now - before.get(pid, 0)) for pid, now in self._family.items())
        read = 0 if had is None or self._had_read is None else max(0, self._had_read - had)
        return ticks / TICKS, read

    def _look_at_threads(self) -> tuple[float, bool]:
        before, self._waits = self._waits, {}
        longest, on_disk, runs = 0, False, False
        for name in self.threads():
            folder = self._folder / "task" / name
            try:
                waits = int((folder / "schedstat").read_bytes().split()[1])
                state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]
            except (OSError, IndexError, ValueError):
                continue  # it has ended
            self._waits[name] = waits
            longest = max(longest, waits - before.get(name, waits))
            on_disk |= state == b"D"
            runs |= state == b"R"
        stolen = self._newly_stolen()
        # Nothing is stolen from threads that all sleep. On a machine whose hypervisor always takes
        # some of the time, a deadlock would else never show.
        return longest / 1e9 + (stolen if runs and before else 0.0), on_disk

    def descendants(self) -> dict[str, int]:
        """The processes that it has started, directly or not, and their ticks so far."""
        # The kernel has lists of children only if it was built with them.
        ticks: dict[str, int] = {}
        children: dict[str, list[str]] = {}
        for folder in self._folder.parent.glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(fields[1].decode(), []).append(folder.name)
                ticks[folder.name] = sum(map(int, fields[11:15]))
        found: dict[str, int] = {}
        waiting = [self._folder.name]
        while waiting:
            for child in children.get(waiting.pop(), ()):
                if child not in found:
                    found[child] = ticks[child]
                    waiting.append(child)
        return found

    def _newly_stolen(self) -> float:
        """Seconds that a hypervisor took from the machine's cores since the last close look: any
        of them may have been this process's."""
        before = self._stolen
        try:
            with self._stolen_from.open("rb") as file:
                self._stolen = int(file.readline().split()[8]) / TICKS
        except (OSError, IndexError, ValueError):
            return 0.0
        return max(0.0, self._stolen - before)

    def threads(self) -> list[str]:
        """Ids of its threads."""
        try:
            return sorted(os.listdir(self._folder / "task"), key=int)
        except (OSError, ValueError):
            return []

    def describe(self, most: int = 64) -> list[str]:
        """A line about each thread: name, state, what it waits for in the kernel, system call."""
        lines = []
        for name in self.threads()[:most]:
            folder = self._folder / "task" / name
            state = _word(folder / "stat").rpartition(")")[2].split()[:1]
            call = _word(folder / "syscall").split()[:1]
            lines.append(
                f"thread {name} {_word(folder / 'comm')}: state {''.join(state) or '?'}, "
                f"in kernel {_word(folder / 'wchan') or '?'}, system call {''.join(call) or '?'}"
            )
        return lines


def _bytes_read(folder: Path) -> int | None:
    try:
        return int((folder / "io").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _word(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
