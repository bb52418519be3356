"""Whether the machine gives this process the cores it wants: how long its threads were ready to run
but had to wait, and why.

The kernel counts for each thread how long it ran and how long it waited in a run queue: the first
two numbers of `/proc/self/task/ID/schedstat`, in nanoseconds. A control group's throttling is part
of it; what a hypervisor takes is not (`/proc/stat`). All of this is Linux's: elsewhere, and where a
file cannot be read, a figure is None. Knows no requests, and of steps only their times.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from quire.core.stats import IterationStats, MachineStats, StepStats
from quire.utils.host import ControlGroups, available_cores

TASKS: Final = Path("/proc/self/task")
SHARE: Final = 0.001
"""Largest share of the time that reading may take."""
LONGEST_PAUSE: Final = 1.0
"""Seconds between two readings at most, whatever they cost."""
GAP: Final = 0.001
"""Seconds between two steps after which waiting is not the step's."""
LONG: Final = 2.0
"""A step that takes so many times as long as usual is always read."""
LIST_SECONDS: Final = 5.0
MACHINE_SECONDS: Final = 1.0
KERNEL_THREADS: Final = "quire-kernel"
"""What csrc/pool.cpp calls its threads."""


class ThreadWaits:
    """By how much the threads that are followed were late because they waited for a core."""

    def __init__(self, tasks: Path = TASKS) -> None:
        self._tasks = tasks
        self._files: dict[int, _Schedstat] = {}
        self._before: dict[int, tuple[int, int]] = {}

    def follow(self, threads: Iterable[int]) -> None:
        """Read these threads from now on, the one first that gives the others work; what new ones
        have waited before does not count."""
        files = {}
        for thread in threads:
            with contextlib.suppress(OSError):
                files[thread] = self._files.get(thread) or _Schedstat(self._tasks, thread)
        self._files = files
        self._before = {t: n for t, n in self._before.items() if t in files}

    def take(self) -> float | None:
        """By how many seconds their work was late since the last call."""
        ran_and_waited, before = [], self._before
        for thread, file in self._files.items():
            now = file.read()
            if now is not None:
                then = before.get(thread, now)
                ran_and_waited.append((now[0] - then[0], now[1] - then[1]))
                before[thread] = now
        return late(ran_and_waited) / 1e9 if ran_and_waited else None


def late(threads: Sequence[tuple[int, int]]) -> float:
    """How much sooner the work of some threads would have been done if none had waited for a core.

    Threads share their work: what one cannot do while it waits, the others do. So while several
    have work, it is late by the share of their time that they waited: half as much, if one of two
    waits. What only the first has to do, nobody does in its place.

    Args:
        threads: How long each ran and how long it waited for a core, in one unit, which is the
            result's. The first gives the others work.
    """
    (ran, waited), *others = threads
    wanted = ran + waited
    shared = min(wanted, max((r + w for r, w in others), default=0))
    alone = waited * (wanted - shared) / wanted if wanted else 0.0
    first = waited - alone
    wanted_by_all = shared + sum(r + w for r, w in others)
    waited_by_all = first + sum(w for _, w in others)
    return alone + (shared * waited_by_all / wanted_by_all if wanted_by_all else 0.0)


class ApiWaits:
    """A sink that writes into each step's statistics how long the thread that it is called on, the
    API process's event loop, waited for a core since the step before."""

    def __init__(self) -> None:
        self._waits: ThreadWaits | None = None

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """To be the first of the sinks: the others read it."""
        if step is None:
            return
        if self._waits is None:
            self._waits = ThreadWaits()
            self._waits.follow([threading.get_native_id()])
        step.api_wait_seconds = self._waits.take()


class _Schedstat:
    """The open file of one thread: to open it costs ten times as much as to read it."""

    __slots__ = ("_descriptor",)

    def __init__(self, tasks: Path, thread: int) -> None:
        self._descriptor = -1
        self._descriptor = os.open(tasks / str(thread) / "schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> tuple[int, int] | None:
        """Nanoseconds ran and waited so far; None if the thread is gone."""
        try:
            ran, waited, *_ = os.pread(self._descriptor, 64, 0).split()
            return int(ran), int(waited)
        except (OSError, ValueError):
            return None

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def computing_threads(stepping: int, tasks: Path = TASKS) -> list[int]:
    """The threads that a step waits for: first the one that drives it, then those of the kernels.
    Without native kernels all count, for torch gives its own no name."""
    try:
        threads = [int(name) for name in os.listdir(tasks)]
    except (OSError, ValueError):
        return []
    helpers = [thread for thread in threads if _name(tasks, thread) == KERNEL_THREADS]
    return [stepping, *(helpers or (thread for thread in threads if thread != stepping))]


def _name(tasks: Path, thread: int) -> str:
    try:
        return (tasks / str(thread) / "comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


class Machine:
    """Other signs that cores are scarce: load, stolen time, throttling."""

    def __init__(
        self, stat: Path = Path("/proc/stat"), groups: ControlGroups | None = None
    ) -> None:
        self._stat = stat
        self._groups = groups or ControlGroups()
        self._cores = available_cores(self._groups)
        self._time: float | None = None
        self._stolen: float | None = None
        self._throttled: float | None = None

    def read(self, now: float) -> MachineStats | None:
        """Figures of the time since the last call; None at the first one."""
        since, stolen, throttled = self._time, self._stolen, self._throttled
        self._time, self._stolen, self._throttled = (
            now,
            self._read_stolen(),
            self._groups.throttled(),
        )
        if since is None:
            return None
        try:
            load: float | None = os.getloadavg()[0]
        except OSError:
            load = None
        return MachineStats(
            now, now - since, load, self._cores,
            _grown(stolen, self._stolen), _grown(throttled, self._throttled),
        )  # fmt: skip

    def _read_stolen(self) -> float | None:
        """Seconds that a hypervisor has taken from all cores together."""
        try:
            with self._stat.open("rb") as file:
                fields = file.readline().split()
            return int(fields[8]) / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError, ValueError):
            return None


def _grown(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else max(0.0, now - before)


class StarvationWatch:
    """Tells each step how long it waited for a core.

    Reading is cheap for a few threads, and is done less often for many: it never takes more than
    `SHARE` of the time.
    """

    def __init__(self, waits: ThreadWaits | None = None, machine: Machine | None = None) -> None:
        self._waits = waits or ThreadWaits()
        self._machine = machine or Machine()
        self._stepping = 0
        self._ended = self._after = self._list_after = self._machine_after = float("-inf")
        self._read = float("-inf")
        # when the threads were read last
        self._usual = 0.0
        # seconds of a step, of late
        self._gap_wait: float | None = None

    def begin(self, now: float) -> None:
        """A step begins: what was waited in a pause before it is not the step's."""
        pause = now - self._ended
        self._gap_wait = None
        if pause > GAP and now >= self._after:
            self._find_threads(now)
            waited = self._waits.take()
            self._gap_wait = None if waited is None else min(waited, pause)
            self._read = now

    def end(self, stats: StepStats, now: float) -> None:
        """A step has ended: write into its statistics what is known."""
        self._ended = now
        seconds, usual = stats.step_seconds, self._usual
        self._usual = usual + 0.1 * (seconds - usual) if usual else seconds
        if now < self._after and seconds < LONG * (usual or seconds):
            return
        begun = time.thread_time()  # not wall time: who waits for a core is to read all the same
        self._find_threads(now)
        waited = self._waits.take()
        if waited is not None:
            # Part of the waiting may have been in steps that were not read: each has its share.
            share = min(1.0, seconds / (now - self._read)) if now > self._read else 1.0
            stats.cpu_wait_seconds = min(share * waited, seconds)
            stats.unread_wait_seconds = (1.0 - share) * waited
            stats.gap_wait_seconds = self._gap_wait
        self._read = now
        read = time.thread_time()
        self._after = now + min(LONGEST_PAUSE, (read - begun) / SHARE)
        if now >= self._machine_after:
            stats.machine = self._machine.read(now)
            self._machine_after = now + max(MACHINE_SECONDS, (time.thread_time() - read) / SHARE)

    def _find_threads(self, now: float) -> None:
        stepping = threading.get_native_id()
        if now >= self._list_after or stepping != self._stepping:
            self._waits.follow(computing_threads(stepping))
            self._stepping, self._list_after = stepping, now + LIST_SECONDS
