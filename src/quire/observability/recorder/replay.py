"""The recorded steps again, one by one: who was in each batch, with how many tokens, and what for.

Between the bytes of the ring (`ring.py`) and those who tell a story from them: explanations,
the timeline, the doctor's figures. `core.facts.Follower` restores the batches; this adds what a
chunk was for and why the queue did not move.
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
    """Tokens of the request that had KV before the step."""
    again: bool
    """They were computed once, and lost."""
    last: bool
    """The request's next token comes out of this step."""


@dataclass(slots=True)
class Step:
    """One recorded step."""

    row: StepRow
    scheduled: dict[int, int]
    """Tokens by request number."""
    chunks: dict[int, PromptChunk]
    """Of those scheduled, the ones that did not simply decode."""
    verified: dict[int, tuple[int, int]]
    """Draft tokens and accepted ones, by request number."""
    facts: list[Fact]
    """All records of the step, and those since the one before."""
    head: QueueHead | None
    """Why the queue did not move, after the step was put together."""
    stalled: int
    """The `Wait` for which running requests got nothing; 0 if all got something."""
    ended: list[Life] = field(default_factory=list)
    """Requests that ended in or right before it."""

    @property
    def name(self) -> int:
        """Its number."""
        return self.row.step


class Replay:
    """Steps of a recording in order. While one is looked at, `lives` tells where requests stand
    after it."""

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
    """What a record says of a chunk; None for a decode: one that verifies drafts, or the first
    one after a swap."""
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
