"""A thread of the core's process that reads or writes and fails takes the process with it: nobody
waits for a core that computes but hears or says nothing."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from patience import PATIENCE
from quire.engine.cores import wire
from quire.engine.messages import AbortRequests

SERVE = """
import socket, sys
from quire.engine.cores.core_process import EngineCoreProcess
sock = socket.socket(fileno=int(sys.argv[1]))
core = EngineCoreProcess(sock)
{before}
core._writer.start()
import threading
threading.Thread(target=core._read, daemon=True).start()
{after}
threading.Event().wait()  # it computes, for ever
"""
GARBAGE = len(b"\xc1\xc1").to_bytes(wire.HEADER, "little") + b"\xc1\xc1"
HUGE = (wire.MAX_FRAME + 1).to_bytes(wire.HEADER, "little")
NO_MEMORY = """
class Full:
    def put(self, message): raise MemoryError
core._inbox = Full()
"""


def end_of(say: bytes, before: str = "", after: str = "", closes: bool = False) -> tuple[int, str]:
    """The exit code and the log of a core whose main thread never ends."""
    ours, theirs = socket.socketpair()
    code = SERVE.format(before=before, after=after)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        ours.sendall(say)
        if closes:
            ours.close()
        try:
            _, log = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    return process.returncode, log


@pytest.mark.parametrize(
    ("say", "before"),
    [(GARBAGE, ""), (wire.encode(AbortRequests(1, ["a"])), NO_MEMORY)],
    ids=["garbage", "no memory"],
)
def test_a_reader_that_fails_ends_the_process(say: bytes, before: str) -> None:
    code, log = end_of(say, before)
    assert code == 1 and "the thread that reads has failed" in log


def test_a_writer_that_fails_ends_the_process() -> None:
    code, log = end_of(b"", after="core._outbox.put('no bytes')")
    assert code == 1 and "the thread that writes has failed" in log


@pytest.mark.parametrize(
    "say", [b"", HUGE, b"\x09"], ids=["closed", "broken frame", "half a frame"]
)
def test_a_front_end_that_is_gone_is_no_failure(say: bytes) -> None:
    code, log = end_of(say, closes=True)
    assert code == 0 and "Traceback" not in log


def test_what_is_written_to_nobody_is_no_failure() -> None:
    code, _ = end_of(b"", after="core._outbox.put(b'x' * 2**24)", closes=True)
    assert code == 0
