"""Child processes: titles, certain ends, and no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE, wait_for
from quire.utils.process import GROUP_SIGNALS, group_signals_held, terminate

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses prctl")
HEAD = "import os, signal, sys, time; from quire.utils.process import *; "


def start(code: str, **how) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", HEAD + code], stdout=subprocess.PIPE, **how)


def gone(pid: int) -> bool:
    """True once the process has ended (a zombie of another parent counts as ended)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_terminate_lets_a_child_end_itself():
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('up', flush=True); "
    with start(code + "time.sleep(600)") as child:
        child.stdout.readline()
        assert terminate(child, grace=PATIENCE) == 7
        assert terminate(child, grace=0) == 7  # ended already


def test_terminate_kills_a_child_that_will_not_go():
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    with start(code + "time.sleep(600)") as child:
        child.stdout.readline()
        assert terminate(child, grace=0.1) == -signal.SIGKILL
        assert not Path(f"/proc/{child.pid}").exists()  # reaped


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_has_not_begun_yet_ends_well_when_told(number):
    code = "\nwith ends_when_told(): print('up', flush=True); time.sleep(600)"
    with start(code) as child:
        child.stdout.readline()
        child.send_signal(number)
        assert child.wait() == 0


def test_a_command_under_nohup_stays_when_its_terminal_goes():
    code = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    code += "with ends_when_told(): print('up', flush=True); sys.stdin.readline()\n"
    code += "sys.exit(7)  # and not 0, as when it is told to end"
    with start(code, stdin=subprocess.PIPE) as child:
        child.stdout.readline()
        child.send_signal(signal.SIGHUP)
        child.communicate(b"\n")
        assert child.returncode == 7


def test_a_child_never_sees_the_signals_of_its_group():
    """Nor those that came before it could say that it leaves them to its parent."""
    child = HEAD + "print('up', flush=True); sys.stdin.readline(); "
    child += "leave_group_signals_to_parent(); print('alive', flush=True)"
    with group_signals_held():
        process = subprocess.Popen(
            [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*GROUP_SIGNALS}
    with process:
        assert process.stdout.readline() == b"up\n"
        for number in GROUP_SIGNALS:
            process.send_signal(number)
        assert process.communicate(b"\n")[0] == b"alive\n" and process.returncode == 0


@linux
def test_a_child_dies_with_its_parent():
    grandchild = HEAD + "print(die_with_parent(os.getppid()), os.getpid(), flush=True)"
    code = f"import subprocess; subprocess.Popen([sys.executable, '-c', {grandchild!r} + "
    code += "'; time.sleep(600)']); time.sleep(600)"
    with start(code) as parent:
        armed, pid = parent.stdout.readline().split()
        assert armed == b"True" and not gone(int(pid))
        parent.kill()
    wait_for(lambda: gone(int(pid)), "its end")


@linux
def test_a_child_whose_parent_is_gone_already_ends_at_once():
    with start("die_with_parent(parent_pid=999999999); print('alive')") as child:
        assert child.stdout.read() == b"" and child.wait() == -signal.SIGKILL
    with start(f"die_with_parent({os.getpid()}); print('alive')") as child:
        assert child.stdout.read() == b"alive\n" and child.wait() == 0


@linux
def test_titles():
    code = "print(set_process_title('quire::EngineCore'), flush=True); time.sleep(600)"
    with start(code) as child:
        assert child.stdout.readline() == b"True\n"
        comm = Path(f"/proc/{child.pid}/comm").read_text()
        line = Path(f"/proc/{child.pid}/cmdline").read_bytes()
        terminate(child, PATIENCE)
    assert comm == "quire::EngineCo\n"  # what the kernel keeps
    assert line.rstrip(b"\0") == b"quire::EngineCore"


def test_the_kernel_ends_it_before_its_parent() -> None:
    """Raising one's own score needs no rights; twice is no more than the most there is."""
    code = (
        "from quire.utils.process import end_first_without_memory as end_first\n"
        "print(end_first(), end_first(), end_first(), open('/proc/self/oom_score_adj').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path = Path("/proc/self/oom_score_adj")
    if path.exists():
        score = min(1000, int(path.read_text()) + 1500)
        assert done.stdout.split() == ["True", "True", "True", str(score)]
    else:
        assert done.stdout.split()[0] == "False"
