"""The ring of records: what the last steps did, and the requests in them.

A `StatSink`. Each step costs one `pack_into` and one append; nothing is decoded until somebody
asks. Memory is bounded: there are a fixed number of rows of fixed size, and a limit on the bytes of
decision records (`quire.core.facts`). Records that leave the ring are applied to `Lives`, so that
requests older than the ring are still known. Knows no HTTP, no text and no tokens.
"""

from __future__ import annotations

import math
import re
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from quire.core.facts import RECORD_BYTES, FactKind, unpack
from quire.core.stats import IterationStats, MachineStats, StepStats
from quire.observability.recorder.lives import Lives

_ROW: Final = struct.Struct("<QQ7d13Q3d")
_EPOCH: Final = struct.Struct("<Q")
STARVED_SECONDS: Final = 0.001
STARVED_SHARE: Final = 0.1
"""Waits for a core that are shorter than this, or a smaller share of their step, are not
reported."""
MACHINE_READINGS: Final = 600
"""Number of machine readings kept; there is about one per second."""
FACT_BYTES_PER_STEP: Final = 2048
"""Decision records may take this many bytes per step of the ring, on average."""


class StepRow(NamedTuple):
    """One step in the ring. Seconds on the core's clock; counts as in `StepStats`."""

    epoch: int
    """Counts engine cores: a new one numbers its steps and requests afresh."""
    step: int
    start: float
    step_seconds: float
    schedule_seconds: float
    forward_seconds: float
    sample_seconds: float
    update_seconds: float
    kv_cache_usage: float
    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_scheduled_tokens: int
    num_scheduled_requests: int
    num_preempted: int
    prefix_queries: int
    prefix_hits: int
    num_blocks_evicted: int
    num_draft_tokens: int
    num_accepted_tokens: int
    prefix_missed: int
    cpu_wait_seconds: float
    """NaN if not known."""
    gap_wait_seconds: float
    api_wait_seconds: float

    @property
    def end(self) -> float:
        """When the step was over."""
        return self.start + self.step_seconds

    @property
    def starved_seconds(self) -> float:
        """How much of `step_seconds` was spent waiting for a core; 0 if that is little or not
        known."""
        return notable_wait(self.cpu_wait_seconds, self.step_seconds)


def notable_wait(waited: float, seconds: float) -> float:
    """`waited`, if it is much for something that took so many seconds, else 0. NaN is not much."""
    return waited if waited >= max(STARVED_SECONDS, STARVED_SHARE * seconds) else 0.0


@dataclass(frozen=True, slots=True)
class AcceptedCompletion:
    """One completion as the frontend knows it."""

    external_id: str
    index: int
    """Which of the request's `n` completions."""
    arrival: float
    """Seconds on the monotonic clock, like all times here."""


class CompletionEnd(NamedTuple):
    """The end of a completion as the frontend saw it."""

    time: float
    reason: str


class Recording:
    """A copy of the ring that can be read on any thread. Rows are unpacked on access.

    Args:
        rows: The ring's rows as bytes, rotated by `first` rows.
        first: Slot of the oldest row.
        facts: Decision records of each step, oldest first.
        before: Where requests stood before the oldest row.
        epoch: The engine core that `before` speaks of.
        names: Internal id by (epoch, number).
        accepted, seen: By internal id; `seen` only of those that have ended.
        block_size: Tokens per KV block.
        prefix_caching: Whether prefixes are looked up.
        limits_changed: When the limits were last changed; None: never.
        machine: Readings of the machine's load, oldest first.
    """

    def __init__(
        self,
        rows: bytes,
        first: int,
        facts: list[bytes],
        before: Lives,
        epoch: int,
        names: dict[tuple[int, int], str],
        accepted: dict[str, AcceptedCompletion],
        seen: dict[str, CompletionEnd],
        block_size: int,
        prefix_caching: bool = True,
        limits_changed: float | None = None,
        machine: Sequence[MachineStats] = (),
    ) -> None:
        slots = len(rows) // _ROW.size
        self._rows, self._first, self._slots = rows, first, slots
        self.facts = facts
        self.before = before
        self.epoch = epoch
        self.names = names
        self.accepted = accepted
        self.seen = seen
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.limits_changed = limits_changed
        self.machine = machine

    def __len__(self) -> int:
        return len(self.facts)

    def row(self, index: int) -> StepRow:
        """The row of a step, 0 being the oldest; negative ones count from the end."""
        index += len(self.facts) if index < 0 else 0
        slot = (self._first + index) % self._slots
        return StepRow._make(_ROW.unpack_from(self._rows, slot * _ROW.size))

    def skip(self, count: int) -> None:
        """Drop the oldest steps; their records are applied to `before`."""
        for index in range(count):
            epoch = self.row(index).epoch
            if epoch != self.epoch:
                self.before, self.epoch = Lives(), epoch
            for fact in unpack(self.facts[index]):
                self.before.apply(fact)
        self.before.ended.clear()
        del self.facts[:count]
        self._first += count

    def keep_last(self, count: int) -> None:
        """Drop all but the last `count` steps."""
        self.skip(max(0, len(self) - count))

    def name(self, epoch: int, number: int) -> str:
        """The id by which the caller knows a request."""
        internal = self.names.get((epoch, number))
        return f"#{number}" if internal is None else self.external(internal)

    def external(self, internal: str) -> str:
        """The caller's id of an internal one."""
        known = self.accepted.get(internal)
        if known is not None:
            return known.external_id
        return re.sub(r"-[0-9a-f]{8}$", "", internal)


class StepRecords:
    """The ring. Its methods are called on the engine's thread or event loop.

    Args:
        num_steps: Steps to keep; 0 keeps nothing.
        block_size: Tokens per KV block, for explanations of prefix hits.
        prefix_caching: Whether prefixes are looked up, also for explanations.
    """

    def __init__(self, num_steps: int, block_size: int = 16, prefix_caching: bool = True) -> None:
        self.num_steps = num_steps
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._rows = bytearray(num_steps * _ROW.size)
        self._facts: deque[bytes] = deque()
        self._fact_bytes = 0
        self._next = 0
        # slot of the next row; the rows before it are the last len(self._facts)
        self._before = Lives()
        self._epoch = self._before_epoch = 0
        self._names: dict[tuple[int, int], str] = {}
        self._accepted: dict[str, AcceptedCompletion] = {}
        self._seen: dict[str, CompletionEnd] = {}
        self._limits_changed: float | None = None
        self._machine: deque[MachineStats] = deque(maxlen=MACHINE_READINGS)

    def __len__(self) -> int:
        return len(self._facts)

    # ---- what goes in ------------------------------------------------------------------------

    def begin_core(self, epoch: int) -> None:
        """Steps come from the core of this epoch from now on; it numbers steps and requests
        afresh."""
        self._epoch = epoch
        if not self._facts:
            self._before_epoch = epoch  # the first core, or one after a core that never stepped

    def accept(self, external_id: str, index: int, internal_id: str, arrival: float) -> None:
        """The frontend has accepted a completion. Call this before the core gets it."""
        if self.num_steps:
            self._accepted[internal_id] = AcceptedCompletion(external_id, index, arrival)

    def change_limits(self, time: float) -> None:
        """The limits were changed at `time`. The core's record of this comes with its next step."""
        self._limits_changed = time

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """Take the facts of one step. Microseconds."""
        if not self.num_steps:
            return
        if step is not None:
            self._add(step)
        if iteration is not None and iteration.finished:
            for ended in iteration.finished:
                known = self._accepted.get(ended.request_id)
                if known is not None:
                    end = known.arrival + ended.e2e_time
                    self._seen[ended.request_id] = CompletionEnd(end, ended.finish_reason)

    def _add(self, s: StepStats) -> None:
        limit = self.num_steps * FACT_BYTES_PER_STEP
        while self._facts and (
            len(self._facts) == self.num_steps or self._fact_bytes + len(s.facts) > limit
        ):
            self._forget()
        for number, name in s.names:
            self._names[self._epoch, number] = name
        _ROW.pack_into(
            self._rows, self._next * _ROW.size, self._epoch, s.step, s.start, s.step_seconds,
            s.schedule_seconds, s.forward_seconds, s.sample_seconds, s.update_seconds,
            s.kv_cache_usage, s.num_running, s.num_waiting, s.num_prompt_tokens,
            s.num_generation_tokens, s.num_scheduled_tokens, s.num_scheduled_requests,
            s.num_preempted, s.prefix_queries, s.prefix_hits, s.num_blocks_evicted,
            s.num_draft_tokens, s.num_accepted_tokens, s.prefix_missed,
            math.nan if s.cpu_wait_seconds is None else s.cpu_wait_seconds,
            math.nan if s.gap_wait_seconds is None else s.gap_wait_seconds,
            math.nan if s.api_wait_seconds is None else s.api_wait_seconds,
        )  # fmt: skip
        if s.machine is not None:
            self._machine.append(s.machine)
        self._next = (self._next + 1) % self.num_steps
        self._facts.append(s.facts)
        self._fact_bytes += len(s.facts)

    def _forget(self) -> None:
        """Drop the oldest step, but keep the state of the requests after it."""
        oldest = (self._next - len(self._facts)) % self.num_steps
        epoch: int = _EPOCH.unpack_from(self._rows, oldest * _ROW.size)[0]
        records = self._facts.popleft()
        self._fact_bytes -= len(records)
        if epoch != self._before_epoch:
            self._drop_core(self._before_epoch)
            self._before, self._before_epoch = Lives(), epoch
        if len(records) == RECORD_BYTES and records[0] == FactKind.STEP:
            return  # only decodes: the commonest step, and it changes nothing in `Lives`
        lives = self._before
        for fact in unpack(records):
            lives.apply(fact)
        for life in lives.ended:
            self._drop(epoch, life.number)
        lives.ended.clear()

    def _drop(self, epoch: int, number: int) -> None:
        internal = self._names.pop((epoch, number), None)
        # A replayed request goes on under another number, and its ids are still needed then.
        if internal is not None and (epoch == self._epoch or internal not in self._names.values()):
            self._accepted.pop(internal, None)
            self._seen.pop(internal, None)

    def _drop_core(self, epoch: int) -> None:
        for key in [key for key in self._names if key[0] == epoch]:
            self._drop(*key)

    # ---- what comes out ----------------------------------------------------------------------

    def snapshot(self) -> Recording:
        """A copy for readers; takes a fraction of a millisecond."""
        first = (self._next - len(self._facts)) % max(1, self.num_steps)
        return Recording(
            bytes(self._rows), first, list(self._facts), self._before.copy(), self._before_epoch,
            dict(self._names), dict(self._accepted), dict(self._seen), self.block_size,
            self.prefix_caching, self._limits_changed, list(self._machine),
        )  # fmt: skip

    def external_ids(self) -> list[str]:
        """Ids of the requests in the ring, latest first."""
        names = (known.external_id for known in reversed(self._accepted.values()))
        return list(dict.fromkeys(names))
