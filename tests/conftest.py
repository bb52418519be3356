"""No test file may leave other kernels behind than those it found: a later one would compare the
bits of a server, which has the default ones, with those of this process."""

import sys

import pytest


@pytest.fixture(autouse=True, scope="module")
def kernels_stay():
    chosen, isa = _kernels()
    yield
    after, isa_after = _kernels()
    assert chosen in (None, after), f"{chosen} kernels before, {after} after"
    assert isa in (None, isa_after), f"instruction set {isa} before, {isa_after} after"


def _kernels():
    """What runs in this process; nothing while no test has loaded it."""
    dispatch = sys.modules.get("quire.kernels.dispatch")
    name = None if dispatch is None else dispatch.ops.__dict__.get("name")
    if name != "native":
        return name, None
    return name, sys.modules["quire.kernels.compiled"].lib.isa()
