"""The end of the loop that `quire chat` runs its engine on."""

from __future__ import annotations

import asyncio

import pytest

from quire.cli import engine_talker


async def test_what_does_not_end_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or Python says of each task that it was destroyed while pending, on the user's terminal."""
    monkeypatch.setattr(engine_talker, "_STOP_SECONDS", 0.01)
    endless = asyncio.ensure_future(asyncio.Event().wait())
    await engine_talker._others_end()
    assert endless.cancelled()
