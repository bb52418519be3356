"""A few hundred schedules of the simulation, and that it notices when recovery is broken."""

from __future__ import annotations

from typing import Any

import pytest

import simulation
from quire.core.scheduler import Scheduler
from quire.engine.cores.supervisor import Supervisor
from quire.engine.frontend import quarantine
from quire.engine.frontend.front_end import FrontEnd
from quire.engine.frontend.quarantine import Quarantine
from quire.engine.messages import FromCore
from simulation import Played, play


async def test_no_schedule_breaks_a_condition() -> None:
    told = await play(0, 150)
    assert not told.broken
    assert told.blamed < told.requests / 50, "many are blamed for what others did"
    assert told.killed > 50 and told.convicted > 10, "few requests killed cores"
    assert told.deaths > 150 and told.tokens > 10_000, "little happened"
    missing = {"died", "lost", "repeated", "reordered", "lost on the way in"} - set(told.acts)
    assert not missing


async def test_a_seed_plays_the_same_again() -> None:
    first, second = [await play(7, 3) for _ in range(2)]
    assert first == second


async def broken() -> Played:
    return await play(0, 60)


async def test_a_gap_that_is_not_noticed_breaks_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Supervisor._on_message

    def deaf(self: Supervisor, message: FromCore) -> None:
        if message.epoch == self.epoch and message.number > self._number:
            self._number = message.number - 1
        heard(self, message)

    monkeypatch.setattr(Supervisor, "_on_message", deaf)
    assert (await broken()).broken


async def test_a_core_that_is_not_fenced_off_breaks_schedules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = Supervisor._on_message

    def credulous(self: Supervisor, message: FromCore) -> None:
        message.epoch, message.number = self.epoch, max(message.number, self._number + 1)
        heard(self, message)

    monkeypatch.setattr(Supervisor, "_on_message", credulous)
    assert (await broken()).broken


async def test_a_replay_without_its_outputs_breaks_schedules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay = FrontEnd.replay

    def forgetful(self: FrontEnd) -> Any:
        requests = replay(self)
        for request in requests:
            request.output_token_ids = []
        return requests

    monkeypatch.setattr(FrontEnd, "replay", forgetful)
    assert (await broken()).broken


async def test_blame_of_one_who_was_not_alone_breaks_schedules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = Quarantine._judge

    def hasty(self: Quarantine, unfinished: Any) -> Any:
        one = next((r for r in unfinished if self._trial == {r.request_id}), None)
        return judge(self, unfinished if one is None else [one])

    monkeypatch.setattr(Quarantine, "_judge", hasty)
    found = (await broken()).broken
    assert any("were there" in why for why in found.values())


async def test_a_culprit_that_is_never_blamed_breaks_schedules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quarantine, "ENOUGH_DEATHS", 10**9)
    monkeypatch.setattr(simulation, "MOST_ACTS", 400)
    assert "it never ends" in str((await broken()).broken)


async def test_an_abort_that_the_core_ignores_breaks_schedules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Scheduler, "finish_requests", lambda *args: None)
    assert (await broken()).broken
