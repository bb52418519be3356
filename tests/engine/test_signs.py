"""What is read of a process from /proc, and the page that a core shares."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from patience import wait_for
from quire.engine.cores.pulse import Activity, Beat, Pulse
from quire.engine.cores.signs import TICKS, ProcessSigns, Signs
from quire.engine.cores.stacks import log_stacks


def write(
    folder: Path, state: str, ticks: int, faults: int, threads: dict[int, tuple[str, int]]
) -> None:
    """A process of number 7, as the kernel shows it."""
    own = folder / "7"
    own.mkdir(exist_ok=True)
    fields = ["0"] * 40
    fields[0], fields[9], fields[11] = state, str(faults), str(ticks)
    (own / "stat").write_text(f"7 (a (b) c) {' '.join(fields)}\n")
    for number, (one, waits) in threads.items():
        task = own / "task" / str(number)
        task.mkdir(parents=True, exist_ok=True)
        (task / "stat").write_text(f"{number} (x) {one} 1 2\n")
        (task / "schedstat").write_text(f"5 {waits} 9\n")


def test_differences_are_told(tmp_path: Path) -> None:
    signs = ProcessSigns(7, tmp_path)
    write(tmp_path, "S", 50, 2, {7: ("S", 10**9), 8: ("S", 10**9)})
    assert signs.look(True) is None, "there is nothing to compare with"
    write(tmp_path, "R", 50 + TICKS, 5, {7: ("R", 10**9), 8: ("D", 3 * 10**9)})
    assert signs.look(True) == Signs(False, False, 1.0, 2.0, 3, True)
    write(tmp_path, "T", 50 + TICKS, 5, {7: ("T", 10**9), 8: ("T", 3 * 10**9)})
    assert signs.look(False) == Signs(True, False, 0.0, 0.0, 0, False)
    write(tmp_path, "t", 50 + TICKS, 5, {8: ("t", 9 * 10**9)})
    assert signs.look(True) == Signs(False, True, 0.0, 0.0, 0, False), "no close look before"


def test_time_is_stolen_from_threads_that_run(tmp_path: Path) -> None:
    """A machine whose hypervisor always takes some of it hides no deadlock."""
    signs = ProcessSigns(7, tmp_path)

    def look(state: str, stolen: int) -> Signs | None:
        write(tmp_path, "S", 50, 2, {7: ("S", 0), 8: (state, 0)})
        (tmp_path / "stat").write_text(f"cpu 1 2 3 4 5 6 7 {stolen} 0 0\n")
        return signs.look(True)

    look("S", 5 * TICKS)
    seen = look("S", 6 * TICKS)
    assert seen is not None and seen.waited == 0.0 and seen.is_still(2.0)
    seen = look("R", 7 * TICKS)
    assert seen is not None and seen.waited == 1.0 and not seen.is_still(2.0)


def test_what_a_process_has_started_and_read_counts_if_it_is_asked_for(tmp_path: Path) -> None:
    signs = ProcessSigns(7, tmp_path)
    write(tmp_path, "S", 50, 2, {7: ("S", 0)})
    for pid in (9, 10, 11):
        (tmp_path / str(pid)).mkdir()

    def tell(ticks: int, read: int) -> None:
        for pid, parent in ((9, 7), (10, 9), (11, 1)):
            line = f"{pid} (cc) S {parent} {' '.join(['0'] * 9)} {ticks} 0 0 0 0\n"
            (tmp_path / str(pid) / "stat").write_text(line)
        (tmp_path / "7" / "io").write_text(f"rchar: {read}\nwchar: 3\n")

    tell(TICKS, 100)
    signs.look(False, family=True)
    signs.look(False, family=True)
    tell(3 * TICKS, 150)
    seen = signs.look(False, family=True)
    assert seen == Signs(False, False, 4.0, 0.0, 0, False, 50) and not seen.is_still(0.2)
    seen = signs.look(False, family=True)
    assert seen == Signs(False, False, 0.0, 0.0, 0, False, 0) and seen.is_still(0.2)
    tell(9 * TICKS, 900)
    assert signs.look(False) == Signs(False, False, 0.0, 0.0, 0, False)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="reads /proc")
def test_a_real_process_that_waits_for_its_child_is_seen_to_work() -> None:
    """And one that reads from a pipe."""
    busy = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", busy], start_new_session=True) as parent:
        signs = ProcessSigns(parent.pid)
        try:
            wait_for(lambda: len(signs.descendants()) == 1)
            wait_for(lambda: (s := signs.look(False)) is not None and s.computed == 0.0)
            signs.look(False, family=True)
            wait_for(lambda: (s := signs.look(False, family=True)) is not None and s.computed > 0)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
    reads = "import os\nwhile os.read(0, 1): os.write(1, b'x')"
    with subprocess.Popen(
        [sys.executable, "-c", reads], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        signs = ProcessSigns(reader.pid)

        def is_seen_to_read() -> bool:
            # It is told so once more if the kernel has just counted a tick of its time: who
            # computes is not asked what it reads.
            signs.look(False, family=True)
            signs.look(False, family=True)
            reader.stdin.write(b"x")
            assert reader.stdout.read(1) == b"x", "it has read by now"
            seen = signs.look(False, family=True)
            return seen is not None and seen.read == 1 and not seen.is_still(0.2)

        wait_for(is_seen_to_read)
        signs.look(False, family=True)
        wait_for(lambda: (s := signs.look(False, family=True)) is not None and s.is_still(0.2))
        reader.kill()


def test_of_a_process_that_is_gone_nothing_is_known(tmp_path: Path) -> None:
    assert ProcessSigns(7, tmp_path).look(True) is None
    assert ProcessSigns(7, tmp_path).describe() == []


def test_the_page_is_read_on_the_other_side() -> None:
    ours = Pulse()
    theirs = Pulse(os.dup(ours.descriptor))
    assert ours.read() == Beat(0, Activity.LOADING, 0, 0, 0, 0, 0)
    theirs.begin(Activity.STEP, 3, 2, 100, 7, 2**40)
    assert ours.read() == Beat(1, Activity.STEP, 3, 2, 100, 7, 2**40)
    theirs.begin(Activity.IDLE, 0, 0, 0, 8, 9)
    assert ours.read() == Beat(2, Activity.IDLE, 0, 0, 0, 8, 9)
    ours._page[0] = 77  # half written
    assert ours.read() is None
    theirs.close()
    ours.close()
    ours.close()


STUCK = """
import sys, signal, threading
from quire.engine.cores.pulse import Activity, Pulse
pulse = Pulse(int(sys.argv[1]))
pulse.dump_at_signal()
def hold_everything(secret):
    pulse.begin(Activity.STEP, 1, 1, 1, 0, 0)
    {how}
hold_everything("the secret of a prompt")
"""
LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@LINUX
@pytest.mark.parametrize(
    ("how", "stops"),
    [
        ("while True: pass", False),
        ("threading.Lock().acquire() and threading.Event().wait()", False),
        ("[sum(range(10**12))]", False),
        ("threading.Event().wait()", True),
    ],
)
def test_stacks_of_a_process_that_is_stuck(
    how: str, stops: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """In Python, in a lock, in native code, and stopped."""
    pulse = Pulse()
    command = [sys.executable, "-c", STUCK.format(how=how), str(pulse.descriptor)]
    with subprocess.Popen(command, pass_fds=[pulse.descriptor]) as process:
        try:
            wait_for(lambda: (beat := pulse.read()) is not None and beat.number == 1)
            signs = ProcessSigns(process.pid)
            if stops:
                process.send_signal(signal.SIGSTOP)
                signs.look(True)
                wait_for(lambda: (seen := signs.look(True)) is not None and seen.stopped)
            log_stacks(process.pid, pulse)
        finally:
            process.kill()
    pulse.close()
    assert "in hold_everything" in caplog.text and "state " in caplog.text
    assert "secret" not in caplog.text
