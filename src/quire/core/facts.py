"""What the scheduler decided and why, one fixed-size record per decision.

Records are written where the decision is made and leave with the step's statistics; logs, traces,
explanations and the simulator read the same bytes. What repeats is not repeated: a running
request that gets the one token a decode needs has no record of its own, and a request that goes
on waiting for the same reason has one. `Follower` restores the whole batch of every step from
the records alone. Knows no text, no clock but the times it is given.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple


class FactKind(enum.IntEnum):
    """What a record says. `a` to `d` by kind; blocks and tokens are counts."""

    STEP = 0
    """A step is put together; what follows belongs to it. a: its token budget, b: running
    requests, c: waiting ones."""
    QUEUED = 1
    """a: prompt tokens, b: output tokens it came with (after a crash), c: priority."""
    ADMITTED = 2
    """a: tokens scheduled, b: tokens found in the prefix cache, c: blocks found, d: blocks taken.
    `reason` is 1 if it comes back after a preemption, 2 if it was swapped out: then b is the
    tokens that came back with it."""
    CHUNK = 3
    """A running request got other than one decode token. a: tokens, b: computed before,
    c: draft tokens among them."""
    STALLED = 4
    """The step ended before these. a: how many at the end of the running order (those admitted in
    this step not counted) got nothing. `reason`: `BUDGET` or `BLOCKS` of `Wait`."""
    WAITS = 5
    """The request at the head of the queue cannot come in. `reason`: a `Wait`; a: needed,
    b: available, of whatever is short. Holds until the next record of that request."""
    PREEMPTED = 6
    """`other`: for whom (0: for nobody). `reason`: a `Loss`; a: computed tokens lost,
    b: blocks given up, c: 1 if they were swapped out."""
    VERIFIED = 7
    """a: draft tokens, b: accepted."""
    FINISHED = 8
    """`reason`: the `RequestStatus`; a: output tokens, b: blocks given up."""
    LIMITS = 9
    """Limits or the policy were changed between steps; other ones held before. a: `max_num_seqs`,
    b: `max_num_batched_tokens`."""


class Wait(enum.IntEnum):
    """Why the head of the queue waits."""

    BUDGET = 1
    """Tokens of the step. Needed: its next chunk (its whole prompt without chunked prefill)."""
    BLOCKS = 2
    MAX_NUM_SEQS = 3
    PREEMPTION = 4
    """A running request was preempted in this step: nobody comes in."""
    POLICY = 5
    """The policy or the delay factor holds it back."""
    ADAPTER = 6
    GRAMMAR = 7
    TRANSFER = 8
    """Its blocks are on their way."""


class Loss(enum.IntEnum):
    """Why a running request lost its place."""

    BLOCKS = 1
    """Others needed its blocks."""
    URGENCY = 2
    """A waiting request with more right to them."""
    FAILURE = 3
    """It had read blocks of a request that failed."""
    UNDONE = 4
    """A step was left by an exception and has not happened: all that ran come back."""


class Fact(NamedTuple):
    """One record, unpacked."""

    kind: int
    reason: int
    step: int
    request: int
    """Number of the request; 0: none."""
    other: int
    time: float
    """Seconds on the core's clock."""
    a: int
    b: int
    c: int
    d: int


FactMark = tuple[bytearray, int, list[tuple[int, str]], int, int]
"""Records and names that have not left yet, with their lengths, and the number of the next
request."""

# Wide: steps and requests are counted for as long as a core lives, and a priority has 64 bits. It
# costs nothing that could be measured beside the call.
_RECORD: Final = struct.Struct("<BB6xQQQdqqqq")
RECORD_BYTES: Final = _RECORD.size
_LARGEST: Final = 2**63 - 1


class FactLog:
    """Collects the records of a step."""

    __slots__ = (
        "_applied_from",
        "_names",
        "_next_number",
        "_records",
        "_waiting",
        "started",
        "step",
        "time",
    )

    def __init__(self) -> None:
        self.step = 0
        self.time = 0.0
        self.started = 0.0
        """When the step began."""
        self._records = bytearray()
        self._names: list[tuple[int, str]] = []
        self._next_number = 1
        self._waiting = (0, 0)
        # the last request that was said to wait, and why
        self._applied_from = 0
        # where the records of applying a step begin

    def begin_step(self, step: int, time: float) -> None:
        """Records belong to this step from now on."""
        self.step = step
        self.time = self.started = time

    def resume(self, step: int, started: float) -> None:
        """Records belong to an earlier step again, whose result is applied now."""
        self.step, self.started = step, started
        self._applied_from = len(self._records)

    def at(self, time: float) -> None:
        """The time of the records that follow, in seconds."""
        self.time = time

    def name(self, request_id: str) -> int:
        """A number for a request, unique in this engine core."""
        number = self._next_number
        self._next_number += 1
        self._names.append((number, request_id))
        return number

    def add(
        self,
        kind: FactKind,
        request: int,
        reason: int = 0,
        other: int = 0,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        d: int = 0,
    ) -> None:
        """Write a record; the meaning of the numbers stands at its kind.

        One that does not fit is told as the largest that does: whatever comes in, to be watched
        must never be what ends a step.
        """
        try:
            self._records += _RECORD.pack(
                kind, reason, self.step, request, other, self.time, a, b, c, d
            )
        except struct.error:
            told = (max(-_LARGEST, min(int(x), _LARGEST)) for x in (a, b, c, d))
            self._records += _RECORD.pack(kind, reason, self.step, request, other, self.time, *told)

    def waits(self, request: int, reason: Wait, needed: int = 0, available: int = 0) -> None:
        """Write why the head of the queue waits, unless that was said last time."""
        if self._waiting != (request, reason):
            self._waiting = (request, reason)
            self.add(FactKind.WAITS, request, reason, a=needed, b=available)

    def limits(self, time: float, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Write that limits have changed, and what holds now."""
        self.at(time)
        self.add(FactKind.LIMITS, 0, a=max_num_seqs, b=max_num_batched_tokens)

    def mark(self) -> FactMark:
        """What there is, for `restore`."""
        records, names = self._records, self._names
        return records, len(records), names, len(names), self._next_number

    def restore(self, mark: FactMark) -> None:
        """Forget what was written since."""
        # What `take` has handed out is whole still: it leaves the originals alone.
        self._records, num_bytes, self._names, num_names, self._next_number = mark
        del self._records[num_bytes:], self._names[num_names:]
        self._waiting = (0, 0)

    def put_back(self, records: bytes, names: list[tuple[int, str]]) -> None:
        """Records that were taken and have not left after all; they come first."""
        self._records = bytearray(records) + self._records
        self._names = names + self._names

    def take(self, of_step: bool = False) -> tuple[bytes, list[tuple[int, str]]]:
        """The records since the last call, and the ids of the requests first named in them.

        Args:
            of_step: Only those since `resume`, which name no new request. The others stay.
        """
        if of_step:
            records = bytes(self._records[self._applied_from :])
            self._records = self._records[: self._applied_from]
            return records, []
        records, names = bytes(self._records), self._names
        self._records = bytearray()
        self._names = []
        return records, names


def unpack(records: bytes) -> Iterator[Fact]:
    """The records in order.

    Raises:
        ValueError: the bytes are no whole number of records.
    """
    if len(records) % RECORD_BYTES:
        raise ValueError(f"{len(records)} bytes are no whole number of {RECORD_BYTES}-byte records")
    yield from map(Fact._make, _RECORD.iter_unpack(records))


class Follower:
    """Restores who was scheduled for how many tokens, from the records of consecutive steps."""

    def __init__(self) -> None:
        self.running: dict[int, None] = {}
        """Numbers of the running requests, in order of admission."""

    def follow(self, records: bytes) -> dict[int, int]:
        """Tokens by request number of the step that the records hold; empty if they hold none."""
        scheduled: dict[int, int] = {}
        new: set[int] = set()
        in_schedule = False
        for fact in unpack(records):
            if fact.kind == FactKind.STEP:
                in_schedule = True
                scheduled = dict.fromkeys(self.running, 1)
            elif fact.kind == FactKind.ADMITTED:
                new.add(fact.request)
                self.running[fact.request] = None
                scheduled[fact.request] = fact.a
            elif fact.kind == FactKind.CHUNK:
                scheduled[fact.request] = fact.a
            elif fact.kind == FactKind.STALLED:
                known = [number for number in self.running if number not in new]
                for number in known[len(known) - fact.a :]:
                    del scheduled[number]
            elif fact.kind in (FactKind.PREEMPTED, FactKind.FINISHED):
                self.running.pop(fact.request, None)
                # What ends after the step was put together was still part of it.
                if in_schedule and fact.kind == FactKind.PREEMPTED and fact.reason != Loss.FAILURE:
                    scheduled.pop(fact.request, None)
        return {number: count for number, count in scheduled.items() if count}
