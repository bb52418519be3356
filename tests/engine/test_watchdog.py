"""What a watchdog calls stuck, and everything that it must not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.stats import StepStats
from quire.engine.cores.process_handle import CoreProcess
from quire.engine.cores.pulse import Activity, Beat
from quire.engine.cores.signs import Signs
from quire.engine.cores.watchdog import (
    COLD_STEPS,
    LOADING_TIMES,
    LOOK_SECONDS,
    UNKNOWN_SECONDS,
    Observation,
    Stall,
    Watchdog,
)
from quire.utils.timing import ManualClock

FLOOR = 2.0
WORKS = Signs(False, False, LOOK_SECONDS, 0.0, 0, False)
SLEEPS = replace(WORKS, computed=0.0)
STOPPED = replace(SLEEPS, stopped=True)
STARVED = replace(SLEEPS, waited=LOOK_SECONDS)
LOADS = replace(SLEEPS, loads=3)
ON_DISK = replace(SLEEPS, on_disk=True)
READS = replace(SLEEPS, read=10)
TRACED = replace(SLEEPS, held=True)
DECODE = Beat(1, Activity.STEP, 1, 1, 100, 5, 7)
PROMPT = Beat(1, Activity.STEP, 4000, 1, 4000 * 4000, 5, 7)
LOADING = Beat(0, Activity.LOADING, 0, 0, 0, 0, 0)
IDLE = Beat(1, Activity.IDLE, 0, 0, 0, 5, 7)


class Rig:
    """A watchdog and a core that is only described."""

    def __init__(self, steps: int = 50, computes: bool = True) -> None:
        self.clock = ManualClock(10.0)
        self.dog = Watchdog(FLOOR, self.clock)
        self.dog.watch_new(computes)
        self.number = 1
        for _ in range(steps):
            self.record(1, 1, 100, 0.01)

    def record(self, tokens: int, rows: int, attended: int, seconds: float) -> None:
        self.dog.record(
            StepStats(
                num_scheduled_tokens=tokens,
                num_scheduled_requests=rows,
                num_attended_tokens=attended,
                step_seconds=seconds,
            )
        )

    def watch(
        self, beat: Beat | None, seconds: float, signs: Signs | None = WORKS, **how: Any
    ) -> tuple[Stall | None, float]:
        """Look for so long; what was found, and after how many seconds."""
        looks = round(seconds / LOOK_SECONDS)
        for k in range(looks + 1):
            if stall := self.look(beat, signs, **how):
                return stall, k * LOOK_SECONDS
            self.clock.advance(LOOK_SECONDS)
        return None, seconds

    def look(
        self,
        beat: Beat | None,
        signs: Signs | None = WORKS,
        pending: int = 0,
        heard: int = 7,
        moves: bool = False,
    ) -> Stall | None:
        if beat is not None and moves:
            self.number += 1
            beat = beat._replace(number=self.number)
        return self.dog.look(Observation(beat, signs, pending), heard)


# ---- stuck -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beat", "signs", "kind"),
    [
        (DECODE, WORKS, "slow"),
        (DECODE, SLEEPS, "still"),
        (PROMPT, SLEEPS, "still"),
        (DECODE, STOPPED, "stopped"),
        (PROMPT, STOPPED, "stopped"),
        (IDLE, STOPPED, "stopped"),
        (DECODE._replace(phase=Activity.CALL), STOPPED, "stopped"),
        (DECODE._replace(phase=Activity.LOADING), STOPPED, "stopped"),
        (DECODE._replace(phase=Activity.TAKING), SLEEPS, "still"),
        (DECODE._replace(tokens=0, rows=0, attended=0), WORKS, "slow"),
        (DECODE, None, "slow"),
    ],
)
def test_a_stuck_core_is_found_within_the_floor(beat: Beat, signs: Signs | None, kind: str) -> None:
    rig = Rig()
    stall, after = rig.watch(beat, 10, signs)
    assert stall is not None and stall.kind == kind
    assert after <= FLOOR + 1e-9


def test_probes_hear_of_it_before_it_is_ended() -> None:
    rig = Rig()
    assert rig.watch(DECODE, 1.4) == (None, 1.4) and not rig.dog.is_stalled
    assert rig.watch(DECODE, 0.2) == (None, 0.2) and rig.dog.is_stalled
    assert rig.look(DECODE, moves=True) is None and not rig.dog.is_stalled


def test_a_long_step_is_stuck_after_five_times_its_prediction() -> None:
    rig = Rig()
    for tokens in (1000, 2000, 4000):
        rig.record(tokens, 1, tokens * tokens, tokens / 1000)
    stall, after = rig.watch(PROMPT, 100)
    assert stall is not None and stall.kind == "slow" and "s expected" in stall.what
    assert 5 * 4 * 0.7 < after < 5 * 4 * 1.3


def test_what_is_told_has_what_was_seen_and_expected() -> None:
    stall, _ = Rig().watch(DECODE, 10)
    assert stall is not None
    assert "step of 1 tokens for 1 requests" in stall.what and "0.010 s expected" in stall.what


def test_a_core_that_takes_no_message_is_stuck() -> None:
    stall, after = Rig().watch(IDLE, 20, SLEEPS, pending=1)
    assert stall is not None and stall.kind == "deaf" and after <= 2 * FLOOR
    stall, after = Rig().watch(DECODE, 20, WORKS, pending=1, moves=True)
    assert stall is not None and stall.kind == "deaf" and after <= 2 * FLOOR + LOOK_SECONDS


def test_a_core_whose_words_do_not_arrive_is_stuck() -> None:
    stall, _ = Rig().watch(DECODE._replace(said=9), 20, moves=True)
    assert stall is not None and stall.kind == "mute"
    assert Rig().watch(DECODE._replace(said=9), 20, heard=9, moves=True)[0] is None


# ---- not stuck ---------------------------------------------------------------------------------


@pytest.mark.parametrize("signs", [STARVED, LOADS, TRACED])
@pytest.mark.parametrize("beat", [DECODE, PROMPT, DECODE._replace(phase=Activity.TAKING)])
def test_a_core_that_is_kept_from_working_is_not_stuck(beat: Beat, signs: Signs) -> None:
    rig = Rig()
    assert rig.watch(beat, 600, signs)[0] is None
    assert not rig.dog.is_stalled


def test_a_core_that_gets_a_tenth_of_the_machine_has_ten_times_as_long() -> None:
    signs = replace(WORKS, computed=0.1 * LOOK_SECONDS, waited=0.9 * LOOK_SECONDS)
    stall, after = Rig().watch(DECODE, 100, signs)
    assert stall is not None and 0.9 * 10 * FLOOR <= after <= 10 * FLOOR


def test_a_disk_is_waited_for_but_not_for_ever() -> None:
    assert Rig().watch(DECODE, 50, ON_DISK)[0] is None
    assert Rig().watch(DECODE, 70, ON_DISK)[0] is not None


@pytest.mark.parametrize("signs", [WORKS, SLEEPS])
def test_an_idle_core_may_be_idle_for_ever(signs: Signs) -> None:
    assert Rig().watch(IDLE, 1000, signs)[0] is None


@pytest.mark.parametrize("signs", [WORKS, STARVED, LOADS, ON_DISK, TRACED, READS])
def test_a_core_that_loads_may_take_any_time_while_anything_moves(signs: Signs) -> None:
    """It computes, or a compiler does that it has started; it reads, or waits for a disk."""
    assert Rig(steps=0).watch(LOADING, 5000, signs, pending=3)[0] is None


def test_what_a_loading_core_tells_is_progress() -> None:
    rig = Rig(steps=0)
    for number in range(20):
        assert rig.watch(LOADING, 0.9 * LOADING_TIMES * FLOOR, SLEEPS, heard=number)[0] is None
    assert rig.watch(LOADING, 2 * LOADING_TIMES * FLOOR, SLEEPS, heard=20)[0] is not None


@pytest.mark.parametrize("computes", [True, False])
def test_a_core_that_loads_and_does_nothing_is_stuck(computes: bool) -> None:
    rig = Rig(steps=0, computes=computes)
    stall, after = rig.watch(LOADING, 1000, SLEEPS)
    assert stall is not None and stall.kind == "still" and "while it loads" in stall.what
    assert 0.9 * LOADING_TIMES * FLOOR < after <= LOADING_TIMES * FLOOR


def test_steps_that_begin_are_progress() -> None:
    assert Rig().watch(DECODE, 600, moves=True)[0] is None
    assert Rig().watch(None, 600)[0] is None


def test_a_first_step_of_which_nothing_is_known_may_compute_for_long() -> None:
    assert Rig(steps=0).watch(PROMPT, UNKNOWN_SECONDS - 1)[0] is None
    stall, _ = Rig(steps=0).watch(PROMPT, UNKNOWN_SECONDS + 1)
    assert stall is not None and "nothing to compare it with" in stall.what
    stall, after = Rig(steps=0).watch(PROMPT, 100, SLEEPS)
    assert stall is not None and stall.kind == "still" and after <= FLOOR


def test_the_first_steps_of_another_core_are_cold() -> None:
    rig = Rig()
    rig.dog.watch_new(computes=True)
    assert rig.watch(DECODE, 4 * FLOOR)[0] is None
    for _ in range(COLD_STEPS):
        rig.record(1, 1, 100, 0.01)
    stall, after = rig.watch(DECODE._replace(number=2), 4 * FLOOR)
    assert stall is not None and after <= FLOOR


def test_a_core_that_waits_for_an_accelerator_uses_no_processor() -> None:
    rig = Rig(computes=False)
    for tokens in (1000, 4000):
        rig.record(tokens, 1, tokens * tokens, tokens / 1000)
    assert rig.watch(PROMPT, 12, SLEEPS)[0] is None


@pytest.mark.parametrize("pause", [3.0, 3600.0, 1e6])
def test_when_this_process_did_not_run_either_nothing_is_to_blame(pause: float) -> None:
    """SIGSTOP of both, a suspended machine, a frozen container, a busy event loop."""
    rig = Rig()
    for signs in (WORKS, SLEEPS, STOPPED):
        rig.look(DECODE, moves=True)
        rig.clock.advance(pause)
        assert rig.look(DECODE._replace(number=rig.number), signs) is None
        assert not rig.dog.is_stalled


def test_a_verb_may_take_long_while_it_does_anything() -> None:
    call = DECODE._replace(phase=Activity.CALL)
    assert Rig().watch(call, 300, WORKS)[0] is None
    assert Rig().watch(call, 50, SLEEPS)[0] is None
    assert Rig().watch(call, 70, SLEEPS)[0] is not None


def test_requests_may_take_a_while_to_be_queued() -> None:
    taking = DECODE._replace(phase=Activity.TAKING)
    assert Rig().watch(taking, 9 * FLOOR)[0] is None
    assert Rig().watch(taking, 11 * FLOOR)[0] is not None


def test_threads_that_wake_up_for_nothing_are_no_work() -> None:
    """A thread that waits for Python's lock does so 200 times a second."""
    stall, _ = Rig().watch(PROMPT, 10, replace(SLEEPS, computed=0.002, waited=0.001))
    assert stall is not None and stall.kind == "still"


def test_messages_are_taken_after_a_long_step() -> None:
    rig = Rig()
    for tokens in (1000, 4000):
        rig.record(tokens, 1, tokens * tokens, tokens / 1000)
    assert rig.watch(PROMPT._replace(said=6), 12, pending=3)[0] is None
    assert rig.look(PROMPT._replace(number=2, taken=8)) is None


@pytest.mark.parametrize(("phase", "wanted"), [(Activity.LOADING, True), (Activity.STEP, False)])
def test_compilers_and_files_count_while_a_core_loads(phase: Activity, wanted: bool) -> None:
    """And only then: a step that is stuck is, whatever other processes do."""
    asked: list[bool] = []
    core = CoreProcess(1, lambda message: None, lambda core, death: None)
    child: Any = SimpleNamespace(pulse=SimpleNamespace(read=lambda: DECODE._replace(phase=phase)))
    signs: Any = SimpleNamespace(look=lambda closely, family: asked.append(family))
    core._child, core._signs = child, signs
    assert core.observe(closely=False) is not None and asked == [wanted]
