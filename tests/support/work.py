"""How much a Python process does, counted: the same on every machine, however busy it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from patience import PATIENCE

TraceFunction = Callable[[FrameType, str, Any], Any]

_COUNT = """
import json, os, sys
calls = 0
def count(frame, event, arg):
    global calls
    if event in ("call", "c_call"):
        calls += 1
sys.setprofile(count)
try:
    exec(sys.argv.pop(1))
except SystemExit:
    pass
finally:
    sys.setprofile(None)
    os.write(int(os.environ["COUNTS"]), json.dumps([calls, sorted(sys.modules)]).encode())
"""


@dataclass(frozen=True)
class Work:
    """What a process has done."""

    calls: int
    """Calls of functions, Python's and built-in ones."""
    modules: frozenset[str]
    """All that it has imported."""


def work_of(code: str, *arguments: str) -> Work:
    """Run a program in a process of its own; `arguments` are its `sys.argv[1:]`."""
    reader, writer = os.pipe()
    with open(reader, "rb") as counts:
        with open(writer, "wb"):
            subprocess.run(
                [sys.executable, "-c", _COUNT, code, *arguments],
                env=os.environ | {"COUNTS": str(writer)},
                pass_fds=[writer],
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=PATIENCE,
            )
        calls, modules = json.loads(counts.read())
    return Work(calls, frozenset(modules))


def lines_of(call: Callable[[], object]) -> int:
    """Lines of Python that a call runs; a comprehension counts one for each of its items."""
    lines = 0

    def count(frame: FrameType, event: str, arg: object) -> TraceFunction:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines
