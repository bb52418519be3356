"""The process that compiles grammars which nobody has looked at yet, and that may be killed.

Run as `python -m quire.structured.helper_process FD`. It loads a vocabulary once. For each grammar
it forks a child, which compiles under limits that the kernel enforces: time of the processor, time
on the clock, memory. A child that exceeds one dies, also inside native code, and this process says
so. Nothing of a grammar outlives its child. It loads no torch.

First comes `HelperSetup`, then one `StructuredOutputsParams` at a time, each answered by one
`Answer`."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Final

import msgspec

from quire.errors import InvalidRequest
from quire.structured.compiler import Vocabulary
from quire.structured.gate import Answer, Refusal, judge
from quire.structured.helper_words import HelperLimits, HelperSetup, receive, send
from quire.structured.params import StructuredOutputsParams
from quire.utils.process import (
    die_with_parent,
    leave_group_signals_to_parent,
    set_process_title,
)

NICENESS: Final = 5
"""Steps of a model come first."""
_DIED: Final = "compiling it takes more memory or a deeper stack than is allowed"


def serve(sock: socket.socket) -> None:
    """Answer until the other end closes."""
    first = receive(sock)
    if first is None:
        return
    begin = msgspec.msgpack.decode(first, type=HelperSetup)
    refusal: Refusal | None = None
    try:
        vocabulary = Vocabulary(begin.tokenizer, begin.vocab_size, begin.eos_token_ids)
    except InvalidRequest as error:
        refusal = Refusal(error.message, error.param)
    while (word := receive(sock)) is not None:
        if refusal is not None:
            send(sock, Answer(refusal=refusal))
            continue
        pid = os.fork()
        if not pid:
            _answer(sock, vocabulary, word, begin.limits)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            why = f"structured_outputs: {_why(status, begin.limits)}."
            send(sock, Answer(refusal=Refusal(why, "structured_outputs")))


def _why(status: int, limits: HelperLimits) -> str:
    """What a child died of."""
    if status == -signal.SIGPROF:
        return f"compiling it takes more than {limits.cpu_seconds:g} seconds"
    if status == -signal.SIGALRM:
        return f"compiling it takes more than {limits.wall_seconds:g} seconds"
    return _DIED


def _answer(sock: socket.socket, vocabulary: Vocabulary, word: bytes, limits: HelperLimits) -> None:
    """In the child: compile, answer, end."""
    code = 1
    with suppress(BaseException):  # whatever it is, this process must not go on as its parent does
        die_with_parent()
        _obey(limits)
        found = judge(vocabulary, msgspec.msgpack.decode(word, type=StructuredOutputsParams))
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(sock, Answer.of(found))
        code = 0
    os._exit(code)


def _obey(limits: HelperLimits) -> None:
    """Let the kernel end this process when it exceeds what one grammar may take."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        with open("/proc/self/statm", "rb") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + limits.memory, held + limits.memory))


def main(argv: list[str]) -> int:
    """Entry point."""
    die_with_parent()
    set_process_title("quire::Grammars")
    leave_group_signals_to_parent()
    with suppress(OSError):
        os.nice(NICENESS)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # a library that panics writes to stderr, and what it writes is a client's
    with socket.socket(fileno=int(argv[1])) as sock, suppress(OSError):
        serve(sock)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
