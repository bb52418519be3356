"""What the scheduler decided and why: one fixed-size record per decision.

A record is written where the decision is made, and leaves with the statistics of the step. Logs,
traces and explanations all read the same bytes. The usual case is not written down: a running
request that gets the one token of a decode has no record, and a request that goes on waiting for
the same reason has only the first. Still, `Follower` restores the whole batch of every step from
the records alone. They know no text, and no clock but the times they are given.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple


class FactKind(enum.IntEnum):
    """What a record says. The meaning of its numbers `a` to `d` depends on it; blocks and tokens
    are counts."""

    STEP = 0
    """A step begins, and the records that follow belong to it. a: its token budget, b: running
    requests, c: waiting requests."""
    QUEUED = 1
    """A request arrived. a: prompt tokens, b: output tokens it came with (after a crash),
    c: priority."""
    ADMITTED = 2
    """A waiting request came in. a: tokens scheduled, b: tokens found in the prefix cache,
    c: blocks found, d: blocks taken. `reason` is 1 if it comes back after a preemption, and 2 if it
    comes back from the second tier: then b counts the tokens that came back with it."""
    CHUNK = 3
    """A running request got something else than the one token of a decode. a: tokens, b: tokens
    computed before, c: draft tokens among a."""
    STALLED = 4
    """Running requests got nothing, because budget or blocks ran out before it was their turn.
    a: how many; they are the last in the order of admission, not counting those admitted in this
    step. `reason`: `Wait.BUDGET` or `Wait.BLOCKS`."""
    WAITS = 5
    """The request at the head of the queue cannot come in. `reason`: a `Wait`; a: how much it
    needs of whatever is short, b: how much there is. Holds until the next record of that
    request."""
    PREEMPTED = 6
    """A running request lost its place. `other`: to which request (0: to none). `reason`: a
    `Loss`; a: computed tokens lost, b: blocks given up, c: 1 if they were swapped out."""
    VERIFIED = 7
    """Drafts were verified. a: draft tokens, b: how many were accepted."""
    FINISHED = 8
    """A request ended. `reason`: its `RequestStatus`; a: output tokens, b: blocks given up."""
    LIMITS = 9
    """Limits or the policy were changed between steps. What holds now is a: `max_num_seqs`,
    b: `max_num_batched_tokens`."""
    CACHE_DROPPED = 10
    """The prefix cache was emptied between steps. a: 1 if only of what no request held, to give
    memory back."""


class Wait(enum.IntEnum):
    """Why the request at the head of the queue waits."""

    BUDGET = 1
    """The tokens of the step are spent. It needs those of its next chunk, or of its whole prompt if
    prompts are not chunked."""
    BLOCKS = 2
    """Too few KV blocks are free."""
    MAX_NUM_SEQS = 3
    """As many run as may."""
    PREEMPTION = 4
    """A running request was preempted in this step, so nothing is admitted."""
    POLICY = 5
    """The delay that batches prompts holds it back."""
    GRAMMAR = 6
    """Its grammar is being compiled. It is not in the queue yet, whatever its head waits for."""
    COMPILED = 7
    """Its grammar is compiled, and it joins the queue."""


class Loss(enum.IntEnum):
    """Why a running request lost its place."""

    BLOCKS = 1
    """A running request needed its blocks."""
    URGENCY = 2
    """A more urgent request was waiting."""
    FAILURE = 3
    """It shared blocks with a request that failed, or lost some to a failed copy."""
    UNDONE = 4
    """A step was left by an exception and was undone: every request that ran comes back."""


class Fact(NamedTuple):
    """One record, unpacked."""

    kind: int
    reason: int
    step: int
    request: int
    """Number of the request, from `FactLog.name`; 0: none."""
    other: int
    time: float
    """Seconds on the core's clock."""
    a: int
    b: int
    c: int
    d: int


FactMark = tuple[bytearray, int, list[tuple[int, str]], int, int]
"""The records that have not left yet and their length in bytes, the names that have not left yet
and their count, and the number of the next request."""

# 64 bits each: steps and requests are counted for as long as a core lives, and a priority has 64
# bits. Narrower fields would save nothing that can be measured beside the call itself.
_RECORD: Final = struct.Struct("<BB6xQQQdqqqq")
RECORD_BYTES: Final = _RECORD.size
_LARGEST: Final = 2**63 - 1


class FactLog:
    """Collects records until the statistics of a step take them."""

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
        # number of the request that was last said to wait, and why
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
        """Write a record; `FactKind` says what its numbers mean.

        A number that does not fit is clipped to the largest that does: whatever a request brings,
        keeping a record of it must not make a step fail.
        """
        try:
            self._records += _RECORD.pack(
                kind, reason, self.step, request, other, self.time, a, b, c, d
            )
        except struct.error:
            told = (max(-_LARGEST, min(int(x), _LARGEST)) for x in (a, b, c, d))
            self._records += _RECORD.pack(kind, reason, self.step, request, other, self.time, *told)

    def waits(self, request: int, reason: Wait, needed: int = 0, available: int = 0) -> None:
        """Write why the head of the queue waits, unless the last such record said the same."""
        if self._waiting != (request, reason):
            self._waiting = (request, reason)
            self.add(FactKind.WAITS, request, reason, a=needed, b=available)

    def compiles(self, request: int, done: bool = False) -> None:
        """Write that a request waits for its grammar, or no longer does. It is beside the queue, so
        this says nothing of the queue's head."""
        self.add(FactKind.WAITS, request, Wait.COMPILED if done else Wait.GRAMMAR)

    def limits(self, time: float, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Write that limits have changed, and what holds now."""
        self.at(time)
        self.add(FactKind.LIMITS, 0, a=max_num_seqs, b=max_num_batched_tokens)

    def cache_dropped(self, time: float, *, only_free: bool) -> None:
        """Write that the prefix cache was emptied between steps."""
        self.at(time)
        self.add(FactKind.CACHE_DROPPED, 0, a=only_free)

    def mark(self) -> FactMark:
        """Where the log stands, for `restore`."""
        records, names = self._records, self._names
        return records, len(records), names, len(names), self._next_number

    def restore(self, mark: FactMark) -> None:
        """Forget what was written since `mark`."""
        # `take` starts new ones and leaves the originals as they are, so these are whole even if it
        # has run since.
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
    """Restores which requests were scheduled for how many tokens, from the records of consecutive
    steps."""

    def __init__(self) -> None:
        self.running: dict[int, None] = {}
        """Numbers of the running requests, in order of admission."""

    def follow(self, records: bytes) -> dict[int, int]:
        """The tokens of the step that the records hold, by request number; empty if they hold no
        step."""
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
                # A request that ended or failed after the step was put together was part of it.
                if in_schedule and fact.kind == FactKind.PREEMPTED and fact.reason != Loss.FAILURE:
                    scheduled.pop(fact.request, None)
        return {number: count for number, count in scheduled.items() if count}
