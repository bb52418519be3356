"""A helper process from the inside: it forks a child for each piece of work.

The child works under limits that the kernel enforces: time of the processor, time on the clock,
memory. A child that exceeds one dies, also inside native code, and its parent says so. Nothing of a
piece of work outlives its child. What runs this has no other threads, because it forks.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from quire.utils.helpers.words import HelperLimits, receive, send
from quire.utils.process import (
    die_with_parent,
    leave_group_signals_to_parent,
    set_process_title,
)

NICENESS: Final = 5
"""Steps of a model come first."""


class Lost(NamedTuple):
    """Why a child gave no answer."""

    why: str
    """What it took: `more than 2 seconds`."""
    passes: bool
    """Whether that may be the machine's fault, which was busy or short of memory just then."""


def become_helper(title: str) -> None:
    """Make this process a helper of its parent: it ends with it, and writes nothing."""
    die_with_parent()
    set_process_title(title)
    leave_group_signals_to_parent()
    with suppress(OSError):
        os.nice(NICENESS)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # a library that panics writes to stderr, and what it writes is a client's


def answer_each(
    sock: socket.socket,
    limits: HelperLimits,
    work: Callable[[bytes], object],
    lost: Callable[[Lost], object],
    done: Callable[[bytes], None] = lambda word: None,
) -> None:
    """Answer words until the other end closes.

    Args:
        sock: The other end's words come here.
        limits: Of each word.
        work: Gives the answer; runs in a child.
        lost: Gives the answer for a child that died.
        done: Runs in this process after a child has answered.
    """
    while (word := receive(sock)) is not None:
        pid = os.fork()
        if not pid:
            _answer(sock, limits, lambda: work(word))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            send(sock, lost(_why(status, limits)))
        else:
            done(word)


def _why(status: int, limits: HelperLimits) -> Lost:
    """What a child died of."""
    if status == -signal.SIGPROF:
        return Lost(f"more than {limits.cpu_seconds:g} seconds", passes=False)
    if status == -signal.SIGALRM:  # less than its limit of the processor's time was left to it
        return Lost(f"more than {limits.wall_seconds:g} seconds", passes=True)
    if status == -signal.SIGKILL:  # the kernel's way to get memory
        return Lost("more memory than the machine has left", passes=True)
    return Lost("more memory or a deeper stack than is allowed", passes=False)


def _answer(sock: socket.socket, limits: HelperLimits, work: Callable[[], object]) -> None:
    """In the child: work, answer, end."""
    code = 1
    with suppress(BaseException):  # whatever it is, this process must not go on as its parent does
        die_with_parent()
        _obey(limits)
        answer = work()
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(sock, answer)
        code = 0
    os._exit(code)


def _obey(limits: HelperLimits) -> None:
    """Let the kernel end this process when it exceeds a limit."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        with open("/proc/self/statm", "rb") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + limits.memory, held + limits.memory))
