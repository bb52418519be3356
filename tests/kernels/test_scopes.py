"""Names around operations, and the bare operations again."""

from __future__ import annotations

import functools

import pytest
from torch.profiler import ProfilerActivity, profile

from quire.kernels import scopes
from quire.kernels.dispatch import OPERATIONS, Ops


def test_an_operations_own_decorator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the table is made while a profiler records, and never gets names."""

    @functools.cache
    def linear() -> None: ...

    table = Ops()
    table.__dict__.update(dict.fromkeys(OPERATIONS), linear=linear)
    made: list[Ops] = []
    monkeypatch.setattr(scopes, "tables", lambda: made)
    for is_made in (False, True):
        with profile(activities=[ProfilerActivity.CPU]):
            scopes.follow()
            assert (table.__dict__["linear"] is linear) is not is_made
            made = [table]
        scopes.follow()
        assert not scopes.names_are_on()
        assert table.__dict__["linear"] is linear
