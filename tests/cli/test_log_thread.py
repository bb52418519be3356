"""A reader of log lines that stands still holds up nothing but its lines."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import pytest

from patience import PATIENCE
from quire.log_thread import LogThread

STUCK = """
import logging, os, sys
from quire.logger import get_logger, setup_logging
setup_logging("Test", detached=True)
for i in range(30_000):
    get_logger("quire.test").info("line %d %s", i, "x" * 90)
print("done", flush=True)
"""


def read(descriptor: int, until: bytes) -> bytes:
    text = b""
    while until not in text:
        text += os.read(descriptor, 65536)
    return text


def test_lines_wait_and_are_then_dropped() -> None:
    reading, writing = os.pipe()
    handler = LogThread(writing, logging.Formatter("%(message)s"), most=100)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    got: list[bytes] = []
    for i in range(5000):
        logger.info("%d %s", i, "x" * 100)
    taking = threading.Thread(target=lambda: got.append(read(reading, b"the last")))
    taking.start()
    assert handler.leave(PATIENCE)
    logger.info("the last")
    taking.join(PATIENCE)
    lines = got[0].decode().split("\n")
    numbers = [int(line.split()[0]) for line in lines if line.endswith("xx")]
    dropped = [int(line.split()[0]) for line in lines if "log lines were dropped" in line]
    assert numbers == sorted(set(numbers)) and numbers[0] == 0
    assert len(numbers) + sum(dropped) == 5000 and 100 <= len(numbers) < 4000
    logger.info("%d", "no number")  # its own error, on stderr
    os.close(reading)
    logger.info("into the void")
    assert handler.leave(PATIENCE)


def test_a_process_whose_lines_nobody_reads_works_and_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert process.wait(PATIENCE) == 0


def test_the_last_lines_of_a_process_are_written() -> None:
    script = STUCK.replace("30_000", "500")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE)
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 500 and "line 499" in lines[-1]


def test_a_line_that_leaves_in_parts_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does through a pipe when a signal comes."""
    reading, writing = os.pipe()
    handler = LogThread(writing, logging.Formatter("%(message)s"))
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.info("a line that is longer than seven bytes")
    logger.info("the last")
    assert handler.leave(PATIENCE)
    found = os.read(reading, 65536)
    assert found == b"a line that is longer than seven bytes\nthe last\n"
