"""How a process of the engine ended, in words for the operator: signal, likely cause, remedy.

`MemoryWatch` looks while the process lives, because a killed one cannot be asked any more.
Reads exit codes, /proc and counters of the control group; knows nothing of requests.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire.utils.host import ControlGroups, held_memory
from quire.utils.math import human_bytes

_REPORT: Final = (
    "please report it with the lines above from 'Fatal Python error' on and what "
    "`quire collect-env` prints"
)
CRASHES: Final = {
    signal.SIGSEGV: "",
    signal.SIGABRT: "",
    signal.SIGFPE: "",
    signal.SIGBUS: "a mapped file (weights, swap file) may have become shorter, or its disk full; "
    "if not, ",
    signal.SIGILL: "this processor may lack an instruction: try QUIRE_KERNELS=reference, and ",
}
"""Signals of a crash in native code, with what comes before the request for a report."""
_LESS: Final = (
    "Give it less with a smaller --kv-cache-memory-bytes, --max-model-len or model, or more memory"
)


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a process."""

    what: str
    """For everybody: `killed by SIGKILL`, `exit code 3`."""
    why: str
    """For the operator: the likely cause, and what to do."""


class MemoryWatch:
    """What one process holds, as last seen, and whether the kernel ran out of memory meanwhile."""

    def __init__(
        self, pid: int, groups: ControlGroups | None = None, proc: Path = Path("/proc")
    ) -> None:
        self._pid = pid
        self._groups = groups or ControlGroups()
        self._proc = proc
        self._before = self._kills()
        self.held: int | None = None
        """Bytes at the last look; `None` if they cannot be read."""

    def look(self) -> None:
        """Read what it holds now: one small file. Of a dead process the last word stays."""
        self.held = held_memory(self._pid, self._proc) or self.held

    def oom_killer_struck(self) -> bool:
        """Whether the kernel's out-of-memory killer ended a process since the watch began."""
        pairs = zip(self._before, self._kills(), strict=True)
        return any(a is not None and b is not None and b > a for a, b in pairs)

    def _kills(self) -> tuple[int | None, int | None]:
        """Of this control group, and of the whole machine."""
        return self._groups.oom_kills(), _machine_kills(self._proc)


def _machine_kills(proc: Path) -> int | None:
    try:
        lines = (proc / "vmstat").read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def describe(exit_code: int | None, memory: MemoryWatch) -> Death:
    """What an exit code (negative: a signal; `None`: it still runs) and its memory tell."""
    if exit_code is None:
        return Death("connection lost", "The process runs, but has closed its socket.")
    if exit_code >= 0:
        return Death(
            f"exit code {exit_code}",
            "It did not say why; a library may have, in what stands above.",
        )
    number, name = -exit_code, _name(-exit_code)
    if number == signal.SIGKILL:
        return Death(f"killed by {name}", _out_of_memory(memory))
    if number in CRASHES:
        before = CRASHES[signal.Signals(number)]
        sentence = f"{before}{_REPORT}"
        return Death(f"crashed with {name}", f"This is a fault in native code: {sentence}.")
    return Death(f"ended by {name}", "Somebody sent that signal to the process.")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _out_of_memory(memory: MemoryWatch) -> str:
    held = f"It held {human_bytes(memory.held)} when last seen. " if memory.held else ""
    if memory.oom_killer_struck():
        return f"Out of memory: the kernel's out-of-memory killer struck. {held}{_LESS}."
    return (
        f"Probably the machine ran out of memory (`dmesg` tells), unless somebody sent kill -9. "
        f"{held}{_LESS}."
    )
