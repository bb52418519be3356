"""Replays the recorded steps one by one: the requests in each batch, with how many tokens and what
for.

Explanations, the timeline and the doctor's figures read the bytes of the ring (`ring.py`) through
this. `core.facts.Follower` restores the batches; this adds what each chunk was for, and why the
queue did not move.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.facts import Fact, FactKind, Follower, unpack
from quire.observability.recorder.lives import Life, Lives, QueueHead
from quire.observability.recorder.ring import Recording, StepRow


class PromptChunk(NamedTuple):
    """Part of a prompt (or of what a preempted request has to compute again) in one step."""

    tokens: int
    before: int
    """Number of the request's tokens that had KV before the step."""
    again: bool
    """Whether these tokens had been computed before and lost."""
    last: bool
    """Whether this step samples the request's next token."""


@dataclass(slots=True)
class Step:
    """One recorded step."""

    row: StepRow
    scheduled: dict[int, int]
    """Tokens by request number."""
    chunks: dict[int, PromptChunk]
    """For each scheduled request that did not simply decode, by its number."""
    verified: dict[int, tuple[int, int]]
    """Draft tokens and accepted ones, by request number."""
    facts: list[Fact]
    """All records since the previous step, this step's included."""
    head: QueueHead | None
    """Why the queue did not move once the step was put together."""
    stalled: int
    """The `Wait` for which some running requests were not scheduled; 0 if all were."""
    ended: list[Life] = field(default_factory=list)
    """Requests that ended in this step or right before it."""

    @property
    def name(self) -> int:
        """Its number."""
        return self.row.step


class Replay:
    """The steps of a recording, in order. While the caller looks at one, `lives` holds the state of
    the requests after it."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.lives: Lives = recording.before.copy()

    def __iter__(self) -> Iterator[Step]:
        recording, epoch = self.recording, self.recording.epoch
        follower = Follower()
        follower.running = dict(self.lives.running)
        for index in range(len(recording)):
            row = recording.row(index)
            if row.epoch != epoch:
                epoch, self.lives, follower = row.epoch, Lives(), Follower()
            yield self._step(row, recording.facts[index], follower)

    def _step(self, row: StepRow, records: bytes, follower: Follower) -> Step:
        lives = self.lives
        step = Step(row, follower.follow(records), {}, {}, list(unpack(records)), None, 0)
        for fact in step.facts:
            kind = fact.kind
            if kind == FactKind.STALLED:
                step.stalled = fact.reason
            elif kind == FactKind.VERIFIED:
                step.verified[fact.request] = (fact.a, fact.b)
            elif (
                kind in (FactKind.CHUNK, FactKind.ADMITTED)
                and fact.request in step.scheduled
                and (chunk := _chunk(fact, lives.lives.get(fact.request))) is not None
            ):
                step.chunks[fact.request] = chunk
            lives.apply(fact)
        step.head = lives.head
        step.ended, lives.ended = lives.ended, []
        return step


def _chunk(fact: Fact, life: Life | None) -> PromptChunk | None:
    """The chunk that a record describes. None if it describes a decode: one that verifies drafts,
    or the first one after a swap-in."""
    tokens, before = fact.a, fact.b
    if fact.kind == FactKind.CHUNK:
        tokens -= fact.c
        if tokens == 1 and fact.c:
            return None
    if life is None:
        return PromptChunk(tokens, before, False, False)
    prompt, again = life.num_prompt_tokens + life.num_prior_outputs, life.num_computed_before
    if tokens == 1 and before >= max(prompt, again):
        return None  # back from the second tier with all it had, it simply goes on
    return PromptChunk(tokens, before, before < again, before + tokens >= max(prompt, again))
