"""What reads or writes in the core's process takes it along when it fails: nobody
waits for a core that computes but hears or says nothing. A core that stops by an exception has
written its log before it says so."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing

import msgspec
import pytest

from patience import PATIENCE
from quire.engine.cores import wire
from quire.engine.cores.pulse import Pulse
from quire.engine.messages import AbortRequests, Failure, FromCore, Start

SERVE = """
import socket, sys
from quire.engine.cores.core_process import EngineCoreProcess
sock = socket.socket(fileno=int(sys.argv[1]))
core = EngineCoreProcess(sock)
{before}
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
    assert code == 1 and "what reads has failed" in log


@pytest.mark.parametrize("call", ["put", "_leave"])
def test_a_writer_that_fails_ends_the_process(call: str) -> None:
    code, log = end_of(b"", after=f"core._sender.{call}('no bytes')")
    assert code == 1 and "what writes has failed" in log


@pytest.mark.parametrize(
    "say", [b"", HUGE, b"\x09"], ids=["closed", "broken frame", "half a frame"]
)
def test_a_front_end_that_is_gone_is_no_failure(say: bytes) -> None:
    code, log = end_of(say, closes=True)
    assert code == 0 and "Traceback" not in log


def test_what_is_written_to_nobody_is_no_failure() -> None:
    code, _ = end_of(b"", after="core._sender.put(b'x' * 2**24)", closes=True)
    assert code == 0


STOPS = """
import os, sys, threading
from quire.engine.cores import core_process
from quire.log_thread import LogThread

asked = threading.Event()
leave, write = LogThread.leave, LogThread._write

def late_write(self, line):
    asked.wait()  # as long as nobody waits for the lines, none is written
    write(self, line)

def leave_now(self):
    asked.set()
    return leave(self, 3600.0)

LogThread._write, LogThread.leave = late_write, leave_now
core_process.EngineCoreProcess._load = lambda self, start: undefined
os._exit(core_process.main(["core", *sys.argv[1:]], 0.0))
"""


def test_the_traceback_of_a_core_that_stops_is_in_the_log_before_it_says_so() -> None:
    ours, theirs = socket.socketpair()
    pulse = Pulse()
    with ours, theirs, closing(pulse):
        handed = [theirs.fileno(), pulse.descriptor]
        process = subprocess.Popen(
            [sys.executable, "-c", STOPS, *map(str, handed)],
            pass_fds=handed,
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        try:
            ours.sendall(wire.encode(Start(1, {}, 0.0)))
            frame = wire.receive(ours)
            process.kill()
            _, log = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert frame is not None
    told = msgspec.msgpack.decode(frame, type=FromCore)
    assert isinstance(told, Failure) and "NameError" in told.message
    assert "Traceback" in log and "'undefined' is not defined" in log
