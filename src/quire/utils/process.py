"""Processes of one machine: their titles, how they end, and children that do not outlive their
parent.

Uses Linux calls where they exist; return values say where they do not. Knows nothing of engines.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
GROUP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal, systemd or a container runtime sends to all processes of a group at
once."""
_MOST_DESCRIPTORS: Final = 2**16
_OOM_SCORE: Final = 500
"""As if it held half of all memory more."""
_NAME_BYTES: Final = 15
"""Linux keeps 15 bytes of a name and a final zero (prctl(2))."""


def _prctl(option: int, argument: Any) -> bool:
    """Call prctl(2); False where it does not exist or the kernel refuses."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(option, argument, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def set_process_title(title: str) -> bool:
    """Name this process for `ps`, `top` and profilers; True if at least the short name was set.

    The short name (`comm`) is cut at 15 bytes. The long one is written over the memory of the
    command line and cut at its length, because Linux shows that memory as the command.
    """
    name = title.encode()[:_NAME_BYTES]
    done = _prctl(_PR_SET_NAME, ctypes.c_char_p(name))
    if done:
        _overwrite_command_line(title.encode())
    return done


def _overwrite_command_line(title: bytes) -> None:
    """Replace what /proc/self/cmdline shows. Field numbers: proc_pid_stat(5)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[48 - 3]), int(fields[49 - 3])
        room = end - start
        if start > 0 and room > 1:
            ctypes.memmove(start, title[: room - 1].ljust(room, b"\0"), room)


def die_with_parent(parent_pid: int | None = None) -> bool:
    """Have the kernel kill this process when its parent ends; True if that is set up.

    Pass `parent_pid` (the parent's `os.getpid()`, handed over at start) to close the gap between
    the fork and this call: if the parent has ended already, this process ends here. Linux treats
    the thread that started this process as the parent, so that thread must live as long as its
    process. On other systems this does nothing.
    """
    armed = _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if armed and parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
    return armed


def raise_descriptor_limit() -> None:
    """Let this process open as many files as it may, because each stream takes a descriptor, and
    the limit that shells give is made for programs without any."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def end_first_without_memory() -> bool:
    """Have the kernel end this process before its parent when memory runs out; True if that is set
    up. See proc_pid_oom_score_adj(5)."""
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            score = min(1000, int(file.read()) + _OOM_SCORE)
            file.seek(0)
            file.write(str(score))
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def group_signals_held() -> Iterator[None]:
    """Block `GROUP_SIGNALS` in this thread; a child started meanwhile begins with them blocked.

    So no such signal reaches the child before it has called `leave_group_signals_to_parent`, not
    even while its interpreter starts. In this process the signals arrive when the block ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_group_signals_to_parent() -> None:
    """Ignore `GROUP_SIGNALS`: the parent gets them too, and ends this process in due time."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


@contextlib.contextmanager
def when_told_to_end(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Call `handler(signal, frame)` at SIGTERM and, unless that is ignored as under nohup, at
    SIGHUP; outside the main thread this does nothing.

    The first process of a container needs a handler, because without one the kernel drops the
    signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, handler)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def ends_when_told() -> contextlib.AbstractContextManager[None]:
    """End with exit code 0 at these signals."""
    return when_told_to_end(lambda *_: sys.exit(0))


def leave_within(seconds: float, code: int) -> threading.Timer:
    """End this process with `code` after so many seconds, even if threads still work or an exit
    handler hangs. Nothing is cleaned up then. Call `cancel()` on the result to call it off."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return timer


def terminate(process: subprocess.Popen[Any], grace: float) -> int:
    """End a child in any case and reap it; returns its exit code (negative: the signal).

    Sends SIGTERM, waits up to `grace` seconds, then sends SIGKILL.
    """
    if process.poll() is None:
        process.terminate()
        try:
            return process.wait(timeout=max(0.0, grace))
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()
