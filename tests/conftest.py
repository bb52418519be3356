"""What holds for every test: the kernels it leaves behind, and the process that it runs in."""

import logging
import os
import signal
import sys
from pathlib import Path

import pytest

SERVERS = {"chaos", "cli", "clients", "e2e", "engine", "observability"}
"""Folders of tests that start servers, in time limits that hold for one server at a time."""


# pytest-xdist tells its processes how wide the terminal of the first one is; a test with a terminal
# of its own has another width.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)


# Nor do servers that tests start inherit that Ctrl-C is ignored, as behind a shell's `&`, or that
# hang-ups are, as under `nohup`. This process still ignores those, but through a handler, because
# children do not inherit handlers.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Say what stays together where two processes share the tests, as `make test` has them.

    All that start servers run in one process, so that two of them do not wait for the same cores.
    Of the rest a file stays whole: it makes its models once.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return "servers" if Path(file).parts[1] in SERVERS else file

    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="module")
def kernels_stay():
    """No file may leave other kernels behind than those it found: a later one would compare the
    bits of a server, which has the default ones, with those of this process."""
    chosen, isa = _kernels()
    yield
    after, isa_after = _kernels()
    assert chosen in (None, after), f"{chosen} kernels before, {after} after"
    assert isa in (None, isa_after), f"instruction set {isa} before, {isa_after} after"


@pytest.fixture(autouse=True, scope="module")
def levels_stay():
    """Nor may a file leave another level of logging, which a command it ran has set."""
    package = logging.getLogger("quire")
    before = package.level
    yield
    package.setLevel(before)


def _kernels():
    """What runs in this process; nothing while no test has loaded it."""
    dispatch = sys.modules.get("quire.kernels.dispatch")
    name = None if dispatch is None else dispatch.ops.__dict__.get("name")
    if name != "native":
        return name, None
    return name, sys.modules["quire.kernels.compiled"].lib.isa()
