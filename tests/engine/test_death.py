"""How the end of a core is told: by exit code, by what it held, by the kernel's counters."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from quire.engine.cores.death import MemoryWatch, describe
from quire.engine.messages import Failure
from quire.errors import EngineDead, ModelLoadError, told
from quire.utils.host import ControlGroups

PID = 7


class Machine:
    """A /proc and a control group of files."""

    def __init__(self, root: Path, version: int) -> None:
        self.proc, self.group = root / "proc", root / "cgroup"
        self.membership = root / "membership"
        folder = self.group / "memory" / "box" if version == 1 else self.group / "box"
        folder.mkdir(parents=True)
        (self.proc / str(PID)).mkdir(parents=True)
        self.membership.write_text("4:memory:/box\n" if version == 1 else "0::/box\n")
        self._events = folder / ("memory.oom_control" if version == 1 else "memory.events")
        self.kills(0, 0)

    def kills(self, in_group: int, in_machine: int) -> None:
        self._events.write_text(f"low 0\noom 9\noom_kill {in_group}\n")
        (self.proc / "vmstat").write_text(f"pgfault 3\noom_kill {in_machine}\nx 1\n")

    def holds(self, pages: int | None) -> None:
        text = "" if pages is None else f"999 {pages} 5 1 0 7 0\n"
        (self.proc / str(PID) / "statm").write_text(text)

    def watch(self) -> MemoryWatch:
        return MemoryWatch(PID, ControlGroups(self.group, self.membership), self.proc)


@pytest.fixture(params=[1, 2])
def machine(tmp_path: Path, request: pytest.FixtureRequest) -> Machine:
    return Machine(tmp_path, request.param)


def test_what_it_held_is_what_was_seen_last(machine: Machine) -> None:
    watch = machine.watch()
    assert "held" not in describe(-signal.SIGKILL, watch).why
    for pages in (2**18, 3 * 2**18, None):  # a zombie's statm is empty, a reaped one has none
        machine.holds(pages)
        watch.look()
    death = describe(-signal.SIGKILL, watch)
    assert death.what == "killed by SIGKILL"
    assert "It held 3.0 GiB when last seen" in death.why
    assert "Probably" in death.why and "kill -9" in death.why


@pytest.mark.parametrize("kills", [(1, 0), (0, 1)])
def test_the_out_of_memory_killer_is_named_where_its_count_rose(
    machine: Machine, kills: tuple[int, int]
) -> None:
    machine.kills(4, 4)
    watch = machine.watch()
    assert not watch.oom_killer_struck()
    machine.kills(4 + kills[0], 4 + kills[1])
    why = describe(-signal.SIGKILL, watch).why
    assert why.startswith("Out of memory: the kernel's out-of-memory killer struck.")


def test_without_any_counters(tmp_path: Path) -> None:
    watch = MemoryWatch(PID, ControlGroups(tmp_path, tmp_path / "no"), tmp_path)
    watch.look()
    assert watch.held is None and not watch.oom_killer_struck()


@pytest.mark.parametrize(
    ("code", "what", "why"),
    [
        (-signal.SIGSEGV, "crashed with SIGSEGV", "quire collect-env"),
        (-signal.SIGABRT, "crashed with SIGABRT", "Fatal Python error"),
        (-signal.SIGBUS, "crashed with SIGBUS", "mapped file"),
        (-signal.SIGILL, "crashed with SIGILL", "QUIRE_KERNELS=reference"),
        (-signal.SIGUSR1, "ended by SIGUSR1", "sent that signal"),
        (-(signal.SIGRTMIN + 1), f"ended by signal {signal.SIGRTMIN + 1}", "sent that signal"),
        (3, "exit code 3", "did not say why"),
        (None, "connection lost", "closed its socket"),
    ],
)
def test_every_end_has_a_sentence(machine: Machine, code: int | None, what: str, why: str) -> None:
    death = describe(code, machine.watch())
    assert death.what == what and why in death.why


def test_advice_is_for_the_operator_alone() -> None:
    error = Failure(
        1, 1, "the engine core stopped: ValueError", "EngineDead", "See the log."
    ).error()
    assert isinstance(error, EngineDead) and "log" not in error.message
    assert told(error) == "the engine core stopped: ValueError. See the log."
    refusal = Failure(1, 1, "no weights", "ModelLoadError").error()
    assert type(refusal) is ModelLoadError and told(refusal) == "no weights"
