"""`Watchdog`: tells a core that is stuck from one that is busy.

It judges by progress, not by age: how long a step may take depends on what it holds and on what
steps of this run have taken (`StepTimes`), and time counts only if the core could have used it.
Time does not count in which it waited for a processor or a disk, was held by a debugger, or in
which this process did not run either: both were suspended then. Knows no processes and ends none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.core.stats import StepStats
from quire.engine.cores.pulse import Activity, Beat
from quire.engine.cores.signs import Signs
from quire.engine.cores.step_times import StepTimes
from quire.utils.timing import Clock

LOOK_SECONDS: Final = 0.2
"""Between two looks."""
MOST_AT_ONCE: Final = 2 * LOOK_SECONDS
"""What counts of the time between two looks: when there was more, nobody looked because this
process did not run."""
TIMES: Final = 5.0
"""A step is stuck after so many times what it should take."""
COLD_STEPS: Final = 8
"""The first steps of a core load code and touch memory for the first time."""
COLD_TIMES: Final = 5.0
"""So many times longer they may take."""
ENOUGH_STEPS: Final = 8
"""Steps without which the model predicts nothing."""
EVERY: Final = 8
"""Of many steps that only decode, one in so many is learned from: they are all alike."""
UNKNOWN_SECONDS: Final = 600.0
"""What a step or call may take that computes and of which nothing is known."""
TAKING_TIMES: Final = 10.0
"""So many times the floor, requests may take to be queued: a message may hold thousands."""
CALL_STILL: Final = 60.0
"""Seconds that a control verb may do nothing."""
LOADING_TIMES: Final = 30.0
"""So many times the floor, a core that loads may do nothing: neither it nor a process that it has
started computes, nothing is read, nothing waits for a disk, and no progress is told."""
DISK_SECONDS: Final = 60.0
"""Longest wait for a disk, without a page that arrives, that is waited out."""
CLOSE_SECONDS: Final = 0.3
"""What takes longer is looked at closely."""
WARN_SHARE: Final = 0.75
"""Part of a limit after which the core counts as stalled, so that probes tell in time."""
KINDS: Final = ("stopped", "still", "slow", "deaf", "mute")
_NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Observation:
    """What is seen of a core from outside."""

    beat: Beat | None
    """What it shows; `None`: just being written."""
    signs: Signs | None
    """What the kernel says; `None`: nothing."""
    pending: int
    """Messages sent to it that it had not taken when it showed that."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Why a core counts as stuck."""

    kind: str
    """One of `KINDS`."""
    what: str
    """What was seen and what was expected, for the operator."""


class Watchdog:
    """Watches one core after the other, and learns from the steps of all.

    Args:
        floor: Seconds without progress that are always allowed.
        clock: Monotonic time.
    """

    def __init__(self, floor: float, clock: Clock) -> None:
        self.is_stalled = False
        """Whether the core has been without progress for most of the time it is allowed."""
        self._floor = floor
        self._clock = clock
        self._times = StepTimes()
        self.watch_new(computes=True)

    def watch_new(self, computes: bool) -> None:
        """Another core is there.

        Args:
            computes: Whether its process computes itself: one that waits for an accelerator uses
                no processor time, and is not stuck.
        """
        self._computes = computes
        self._looked = self._clock.now()
        self._beat: Beat | None = None
        self._num_steps = 0
        self._heard = 0
        self._limit: tuple[int, tuple[float, float | None]] | None = None
        self._progressed()
        self._forget_process()
        self.is_stalled = False

    def _progressed(self) -> None:
        self._age = self._on_disk = 0.0

    def _forget_process(self) -> None:
        self._stopped = self._still = self._deaf = self._mute = 0.0

    def record(self, stats: StepStats) -> None:
        """Learn from a step that has ended."""
        self._num_steps += 1
        tokens, rows = stats.num_scheduled_tokens, stats.num_scheduled_requests
        if tokens == rows and self._num_steps % EVERY and self._times.num_steps > ENOUGH_STEPS:
            return
        if tokens:
            self._times.add(tokens, rows, stats.num_attended_tokens, stats.step_seconds)

    @property
    def looks_closely(self) -> bool:
        """Whether the next look is to be a close one."""
        return max(self._age, self._still, self._stopped, self._deaf, self._mute) > CLOSE_SECONDS

    def look(self, seen: Observation, heard: int) -> Stall | None:
        """Judge.

        Args:
            seen: What is seen now.
            heard: Number of the last message heard of it.

        Returns:
            Why it counts as stuck; `None` if it does not.
        """
        now = self._clock.now()
        passed = min(now - self._looked, MOST_AT_ONCE)
        self._looked = now
        beat, before = seen.beat, self._beat
        if beat is None:
            self._progressed()
            self._forget_process()
            return None
        self._beat = beat
        counts = self._countable(seen.signs, passed)
        if before is None or beat.number != before.number:
            self._progressed()
            self._still = 0.0
        else:
            self._age += counts
            self._count_stillness(seen, passed)
        stopped = seen.signs is not None and seen.signs.stopped
        self._stopped = self._stopped + passed if stopped else 0.0
        if beat.phase is Activity.LOADING and heard != self._heard:
            self._still = 0.0  # it tells how far it is
        self._count_silence(seen, before, heard, counts)
        return self._judge(beat)

    # ---- counting ----------------------------------------------------------------------------

    def _countable(self, signs: Signs | None, passed: float) -> float:
        """The part of the time that the core could have used."""
        if signs is None:
            return passed
        if signs.held:
            return 0.0
        if signs.loads:
            self._on_disk = 0.0
            return 0.0
        if signs.on_disk and self._on_disk < DISK_SECONDS:
            self._on_disk += passed
            return 0.0
        return max(0.0, passed - signs.waited)

    def _count_stillness(self, seen: Observation, passed: float) -> None:
        signs = seen.signs
        if signs is not None and not signs.stopped and signs.is_still(passed):
            self._still += passed
        else:
            self._still = 0.0

    def _count_silence(
        self, seen: Observation, before: Beat | None, heard: int, counts: float
    ) -> None:
        """Whether it takes what it is sent, and whether what it says arrives. Both may lag during a
        step, because the page is written before one."""
        beat = seen.beat
        assert beat is not None, "there is none to judge otherwise"
        rests = beat.phase is Activity.IDLE or before is None or beat.number != before.number
        took = before is None or beat.taken != before.taken or not seen.pending
        if took or beat.phase is Activity.LOADING:
            self._deaf = 0.0
        elif rests:
            self._deaf += counts
        if heard != self._heard or beat.said <= heard:
            self._heard, self._mute = heard, 0.0
        else:
            self._mute += counts

    # ---- judging -----------------------------------------------------------------------------

    def _judge(self, beat: Beat) -> Stall | None:
        age_limit, still_limit = self._limits(beat)
        silence = 2 * self._floor
        rows = (
            ("stopped", self._stopped, self._floor, "its process is stopped by a signal"),
            ("still", self._still, still_limit, "it uses no processor and waits for none"),
            ("slow", self._age, age_limit, "it has taken too long"),
            ("deaf", self._deaf, silence, "it takes no message"),
            ("mute", self._mute, silence, "what it says does not arrive"),
        )
        self.is_stalled = any(seconds >= WARN_SHARE * limit for _, seconds, limit, _ in rows)
        for kind, seconds, limit, what in rows:
            if seconds + LOOK_SECONDS > limit:  # by the next look it will be over the limit
                expected = self._allowed(beat)[1] if beat.phase is Activity.STEP else None
                return Stall(kind, _tell(beat, what, seconds, limit, expected, self._age))
        return None

    def _limits(self, beat: Beat) -> tuple[float, float]:
        """Seconds that what goes on may take, and may be still."""
        still = self._floor if self._computes else _NEVER
        match beat.phase:
            case Activity.IDLE:
                return _NEVER, _NEVER
            case Activity.LOADING:
                # How long it takes to read, to compile and to compute is not known. An accelerator
                # works for nobody yet.
                return _NEVER, LOADING_TIMES * self._floor
            case Activity.CALL:
                return UNKNOWN_SECONDS, max(self._floor, CALL_STILL)
            case Activity.TAKING:
                return TAKING_TIMES * self._floor, still
        # Whoever is far below the floor is below every limit: to predict takes milliseconds.
        if self._age < self._floor / 2:
            return _NEVER, still
        return self._allowed(beat)[0], still

    def _allowed(self, beat: Beat) -> tuple[float, float | None]:
        """Seconds that a step may take, and that it should take, if that is known."""
        if self._limit is None or self._limit[0] != beat.number:
            self._limit = beat.number, self._predict(beat)
        return self._limit[1]

    def _predict(self, beat: Beat) -> tuple[float, float | None]:
        if self._times.num_steps < ENOUGH_STEPS:
            return max(self._floor, UNKNOWN_SECONDS), None
        expected = self._times.predict(beat.tokens, beat.rows, beat.attended)
        assert expected is not None, "it has learned from steps"
        times = COLD_TIMES if self._num_steps < COLD_STEPS else 1.0
        return times * max(self._floor, TIMES * expected), expected


def _tell(
    beat: Beat, what: str, seconds: float, limit: float, expected: float | None, age: float
) -> str:
    about = {
        Activity.IDLE: "with nothing to do",
        Activity.LOADING: "while it loads",
        Activity.TAKING: "while it takes requests",
        Activity.CALL: "in a control verb",
        Activity.STEP: f"in a step of {beat.tokens} tokens for {beat.rows} requests "
        f"({beat.attended} attended)",
    }[beat.phase]
    should = "nothing to compare it with" if expected is None else f"{expected:.3f} s expected"
    time = f"; so far {age:.1f} s of its own, {should}" if beat.phase is Activity.STEP else ""
    return f"{about}: {what} for {seconds:.1f} s, {limit:.1f} s allowed{time}"
