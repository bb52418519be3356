"""The state of each request, derived from the scheduler's records alone.

`Lives` applies records in order. The ring (`ring.py`) applies the records it drops to one, and a
reader of the ring continues from there. Knows no clock, and nothing of what a step costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from quire.core.facts import Fact, FactKind, Wait


@dataclass(slots=True)
class Life:
    """One request, as far as its records have been read. Times on the core's clock."""

    number: int
    queued: float
    num_prompt_tokens: int
    num_prior_outputs: int = 0
    """Output tokens it already had when it was queued, because it was replayed after a crash."""
    priority: int = 0
    state: str = "waiting"
    """`waiting`, `running`, `preempted`, `swapped` or `finished`."""
    compiles: bool = False
    """It waits for its grammar, beside the queue."""
    admitted: float | None = None
    """Time of its first admission."""
    num_cached_tokens: int = 0
    """Tokens found in the prefix cache at the first admission."""
    num_cached_blocks: int = 0
    computed: int = 0
    """Prompt tokens that have KV; decode steps do not add to it."""
    num_computed_before: int = 0
    """Tokens up to here were computed once and lost, so computing them is recomputation."""
    num_preemptions: int = 0
    status: int = 0
    """`RequestStatus` it ended with."""
    num_output_tokens: int = 0
    """0 until the end."""


_BESIDE_THE_QUEUE: Final = (Wait.GRAMMAR, Wait.COMPILED)


class QueueHead(NamedTuple):
    """Why the queue does not move."""

    number: int
    """The request at its head."""
    reason: int
    needed: int
    available: int


class Lives:
    """All requests that have not ended, after the records read so far."""

    def __init__(self) -> None:
        self.lives: dict[int, Life] = {}
        self.running: dict[int, None] = {}
        """In order of admission."""
        self.head: QueueHead | None = None
        self.ended: list[Life] = []
        """Requests whose end was just applied; the reader empties this list."""

    def copy(self) -> Lives:
        """A copy; applying records to it leaves this one unchanged."""
        twin = Lives()
        twin.lives = {number: replace(life) for number, life in self.lives.items()}
        twin.running = dict(self.running)
        twin.head = self.head
        return twin

    def apply(self, fact: Fact) -> None:
        """Apply one record."""
        kind = fact.kind
        if kind == FactKind.STEP or kind == FactKind.STALLED:
            return
        if kind == FactKind.QUEUED:
            life = Life(fact.request, fact.time, fact.a, fact.b, fact.c)
            life.num_computed_before = fact.a + fact.b if fact.b else 0
            self.lives[fact.request] = life
            return
        known = self.lives.get(fact.request)
        if known is None:  # its beginning was lost with an engine core
            return
        if kind == FactKind.WAITS and fact.reason in _BESIDE_THE_QUEUE:
            known.compiles = fact.reason == Wait.GRAMMAR
        elif kind == FactKind.WAITS:
            self.head = QueueHead(fact.request, fact.reason, fact.a, fact.b)
        elif kind == FactKind.ADMITTED:
            self._admit(known, fact)
        elif kind == FactKind.CHUNK:
            known.computed = fact.a + fact.b
        elif kind == FactKind.PREEMPTED:
            self._preempt(known, fact)
        elif kind == FactKind.FINISHED:
            self._finish(known, fact)

    def _admit(self, life: Life, fact: Fact) -> None:
        if life.admitted is None:
            life.admitted = fact.time
            life.num_cached_tokens, life.num_cached_blocks = fact.b, fact.c
        life.state = "running"
        life.computed = fact.a + fact.b
        self.running[fact.request] = None
        self._leave_queue(fact.request)

    def _preempt(self, life: Life, fact: Fact) -> None:
        life.state = "swapped" if fact.c else "preempted"
        life.num_preemptions += 1
        if not fact.c:
            life.num_computed_before = max(life.num_computed_before, fact.a)
            life.computed = 0
        self.running.pop(fact.request, None)

    def _finish(self, life: Life, fact: Fact) -> None:
        life.state = "finished"
        life.status, life.num_output_tokens = fact.reason, fact.a
        self.running.pop(fact.request, None)
        self._leave_queue(fact.request)
        del self.lives[fact.request]
        self.ended.append(life)

    def _leave_queue(self, number: int) -> None:
        if self.head is not None and self.head.number == number:
            self.head = None


_WAIT_NAMES: Final = {int(wait): wait.name.lower() for wait in Wait}


def wait_name(reason: int) -> str:
    """Name of a `Wait` in JSON and text: `max_num_seqs`, `blocks`, ..."""
    return _WAIT_NAMES.get(reason, "step")
