"""The life of one completion, cut into episodes with one cause each.

The time from its arrival at the frontend to the end that the frontend saw is cut where steps begin
and end. An episode is what the request did, or why it could do nothing. Each episode begins where
the previous one ends, so they always add up to the measured latency. `assemble.py` makes an
explanation from them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from quire.core.facts import Fact, FactKind, Loss, Wait
from quire.observability.explain.parts import Cause
from quire.observability.recorder.lives import Life
from quire.observability.recorder.replay import Replay, Step
from quire.observability.recorder.ring import STARVED_SECONDS, STARVED_SHARE, Recording

_HELD = (Wait.MAX_NUM_SEQS, Wait.BLOCKS)
"""Waits for something that running requests hold, whatever they compute."""


@dataclass(slots=True)
class Episode:
    """Time with one cause while it is being gathered; it need not be contiguous."""

    cause: Cause
    reason: int = 0
    seconds: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)
    blamed: Counter[int] = field(default_factory=Counter)
    """Other requests, with the prompt tokens they computed meanwhile (0: they were ahead in the
    queue)."""
    holders: Counter[int] = field(default_factory=Counter)
    """Other requests that held the places or blocks it waited for, with the number of steps."""
    tokens: int = 0
    """Tokens that the request itself computed."""
    batches: list[int] = field(default_factory=list)
    behind_others: float = 0.0
    """Seconds in which another request was at the head of the queue."""
    slowest: tuple[float, int] = (0.0, 0)
    facts: dict[str, Any] = field(default_factory=dict)
    """Further details that the sentence needs."""


class Story:
    """Cuts the time of one completion into episodes, step by step.

    Args:
        recording: The records.
        keys: (epoch, number) under which each engine core knew the completion.
        arrival: When the frontend got it; None: take the time it was queued.
        end: When the frontend saw its end, or now; None: take the time the core ended it.
    """

    def __init__(
        self,
        recording: Recording,
        keys: set[tuple[int, int]],
        arrival: float | None,
        end: float | None,
    ) -> None:
        self.recording = recording
        self.keys = keys
        self.epoch = recording.epoch
        self.number = next((n for e, n in keys if e == self.epoch), 0)
        self.arrival, self.end = arrival, end
        self.episodes: dict[tuple[Any, ...], Episode] = {}
        self.cursor = arrival
        self.life: Life | None = None
        self.first_token: float | None = None
        self.slowest: tuple[float, Step] | None = None
        self.evicted: int | None = None
        """Cached blocks evicted before its admission; None if the records do not reach back."""
        self._evicted = 0
        self._state = ""
        self._lost = 0
        self._compiles = False
        self._now_waits = (0, False)
        # Why it waits, and whether it is at the head of the queue.
        self._step: Step | None = None

    @property
    def state(self) -> str:
        """`waiting`, `compiling` (its grammar), `running`, `preempted` or `finished`; nothing
        before the core spoke of it."""
        return "compiling" if self._compiles else self._state

    # ---- the cuts ----------------------------------------------------------------------------

    def _cut(self, until: float, cause: Cause, *key: Any, reason: int = 0) -> Episode:
        """Attribute the time up to `until` to a cause."""
        episode = self.episodes.get((cause, reason, *key))
        if episode is None:
            episode = self.episodes[(cause, reason, *key)] = Episode(cause, reason)
        start = self.cursor if self.cursor is not None else until
        until = max(start, until if self.end is None else min(until, self.end))
        self.cursor = until
        if until > start:
            episode.seconds.append(until - start)
            if episode.spans and episode.spans[-1][1] == start:
                episode.spans[-1] = (episode.spans[-1][0], until)
            else:
                episode.spans.append((start, until))
        return episode

    def tell(self) -> None:
        """Go through the recording."""
        replay = Replay(self.recording)
        self._begin(replay.lives.lives.get(self.number))
        for step in replay:
            if step.row.epoch != self.epoch:
                self._next_core(step.row.epoch)
            before = self.life is None or self.life.admitted is None
            self._take(step)
            self._evicted += step.row.num_blocks_evicted
            if self.life is not None:
                known = (replay.lives.lives.get(self.number), *step.ended)
                self.life = next((i for i in known if i and i.number == self.number), self.life)
            if before and self.life is not None and self.life.admitted is not None:
                self._admitted()
            self._step = step
            if self._state == "finished":
                break
        self._close()

    def _admitted(self) -> None:
        """The completion was just admitted, so the prefix cache was asked."""
        first = self.recording.row(0)
        if first.step == 1 and first.epoch == self.epoch:
            self.evicted = self._evicted
        elif self._evicted:
            self.evicted = self._evicted  # at least: older steps may have evicted more

    def _begin(self, life: Life | None) -> None:
        """What happened before the oldest record."""
        if life is None or not len(self.recording):
            return
        self._queued(life.queued, life)
        if life.admitted is not None:
            self._cut(life.admitted, Cause.QUEUED)
            self._cut(self.recording.row(0).start, Cause.EARLIER)
            self._state = life.state

    def _queued(self, time: float, life: Life | None) -> None:
        if self.cursor is None:
            self.arrival = self.cursor = time
        if self._state:
            self._cut(time, Cause.RESTART)
        else:
            self._arrived()
            self._cut(time, Cause.INTAKE)
        self._state, self.life = "waiting", life
        self._compiles = life is not None and life.compiles
        self._now_waits = (0, False)

    def _arrived(self) -> None:
        """The core takes requests in between steps: one that came within a step waited for its
        end."""
        step, arrival = self._step, self.cursor
        if step is None or arrival is None or step.row.end <= arrival:
            return
        self._cut(step.row.start, Cause.INTAKE)
        self._note(self._cut(step.row.end, Cause.QUEUED), step)

    def _next_core(self, epoch: int) -> None:
        self.epoch = epoch
        self.number = next((n for e, n in self.keys if e == epoch), 0)

    # ---- one step ----------------------------------------------------------------------------

    def _take(self, step: Step) -> None:
        me = self.number
        begun = False
        ended: Fact | None = None
        for fact in step.facts:
            if fact.kind == FactKind.STEP:
                begun = True
            elif fact.request == me and fact.kind == FactKind.QUEUED:
                self._queued(fact.time, _life_of(fact))
            elif fact.request == me and fact.kind == FactKind.WAITS:
                self._compile(fact)
            elif fact.request == me and fact.kind == FactKind.FINISHED:
                ended = fact
                if not begun:
                    return self._finish(fact)
        if not self._state or self._state == "finished":
            return
        self._gap(step)
        self._spend(step)
        if ended is not None:
            self._finish(ended)

    def _compile(self, fact: Fact) -> None:
        """It waits for its grammar, or no longer does; either is said between steps."""
        if fact.reason == Wait.COMPILED and self._compiles:
            self._cut(fact.time, Cause.QUEUED, reason=Wait.GRAMMAR)
        if fact.reason in (Wait.GRAMMAR, Wait.COMPILED):
            self._compiles = fact.reason == Wait.GRAMMAR

    def _gap(self, step: Step) -> None:
        """The time before the step."""
        start = step.row.start
        if self._state == "running":
            waited = step.row.gap_wait_seconds
            pause = start - (self.cursor if self.cursor is not None else start)
            if waited >= max(STARVED_SECONDS, STARVED_SHARE * pause):
                self._cut(start - pause + min(waited, pause), Cause.CORE_WAIT)
            self._cut(start, Cause.BETWEEN_STEPS)
        elif self._compiles:
            self._cut(start, Cause.QUEUED, reason=Wait.GRAMMAR)
        elif self._state == "waiting" and self._now_waits[0]:
            self._cut(start, Cause.QUEUED, reason=self._now_waits[0])
        elif self._state == "waiting":
            self._cut(start, Cause.BETWEEN_STEPS)
        else:
            self._cut(start, Cause.PREEMPTED, self._lost)

    def _spend(self, step: Step) -> None:
        """The time of the step itself."""
        me = self.number
        for fact in step.facts:
            if fact.request != me:
                continue
            if fact.kind == FactKind.PREEMPTED:
                self._preempted(fact, step)
            elif fact.kind == FactKind.ADMITTED:
                self._state = "running"
        end = step.row.end
        if me in step.scheduled:
            self._starve(step)
            self._work(step, end)
        elif self._state == "running":
            episode = self._cut(end, Cause.STALLED, reason=step.stalled)
            self._note(episode, step)
        elif self._compiles:
            self._cut(end, Cause.QUEUED, reason=Wait.GRAMMAR).steps.add(step.row.step)
        elif self._state == "waiting":
            self._wait(step, end)
        else:
            self._note(self._cut(end, Cause.PREEMPTED, self._lost), step)

    def _starve(self, step: Step) -> None:
        """Attribute the time that the step waited for a core. When in the step that was is not
        known; it is shown at its beginning."""
        if starved := step.row.starved_seconds:
            episode = self._cut(step.row.start + starved, Cause.CORE_WAIT)
            episode.steps.add(step.row.step)

    def _preempted(self, fact: Fact, step: Step) -> None:
        self._lost += 1
        episode = self._cut(self.cursor or 0.0, Cause.PREEMPTED, self._lost)
        episode.facts = {
            "step": step.row.step,
            "for": fact.other,
            "loss": fact.reason,
            "tokens": fact.a,
            "swapped": bool(fact.c),
        }
        if fact.reason != Loss.FAILURE:
            self._state = "preempted"
            if fact.other:
                episode.blamed[fact.other] += 0

    def _wait(self, step: Step, end: float) -> None:
        head = step.head
        reason = head.reason if head is not None else 0
        episode = self._cut(end, Cause.QUEUED, reason=reason)
        if reason in _HELD:
            # What it lacks is held by all running requests, whether or not they compute prompts, so
            # they are named by how long they held it.
            self._count(episode, step)
            episode.holders.update(step.scheduled)
        else:
            self._note(episode, step)
        if head is not None:
            episode.facts |= {"needed": head.needed, "available": head.available}
            if head.number != self.number:
                episode.behind_others += step.row.step_seconds
                episode.facts.setdefault("ahead", set()).add(head.number)
        self._now_waits = (reason, head is not None and head.number == self.number)

    def _work(self, step: Step, end: float) -> None:
        me = self.number
        chunk = step.chunks.get(me)
        if chunk is not None and chunk.again:
            episode = self._cut(end, Cause.RECOMPUTED, self._lost)
            lost = self.episodes.get((Cause.PREEMPTED, 0, self._lost))
            episode.facts |= {k: v for k, v in lost.facts.items() if k != "tokens"} if lost else {}
        elif chunk is not None:
            episode = self._cut(end, Cause.PREFILL)
        else:
            episode = self._cut(end, _beside(step))
        self._note(episode, step)
        episode.tokens += step.scheduled[me]
        if self.slowest is None or step.row.step_seconds > self.slowest[0]:
            self.slowest = (step.row.step_seconds, step)
        if self.first_token is None and (chunk is None or chunk.last):
            self.first_token = end if self._reaches_back else None
        if any(f.kind == FactKind.PREEMPTED and f.request == me for f in step.facts):
            self._state = "preempted"  # after the step, by a failure of another

    @property
    def _reaches_back(self) -> bool:
        """Whether the records reach back to before the first token."""
        return (Cause.EARLIER, 0) not in self.episodes

    def _note(self, episode: Episode, step: Step) -> None:
        """Remember the other requests in the step."""
        self._count(episode, step)
        self._blame(episode, step)

    def _count(self, episode: Episode, step: Step) -> None:
        episode.steps.add(step.row.step)
        episode.batches.append(len(step.scheduled))
        worked = step.row.step_seconds - step.row.starved_seconds
        if worked > episode.slowest[0]:
            episode.slowest = (worked, step.row.step)

    def _blame(self, episode: Episode, step: Step) -> None:
        for number, chunk in step.chunks.items():
            if number != self.number:
                episode.blamed[number] += chunk.tokens

    # ---- the end -----------------------------------------------------------------------------

    def _finish(self, fact: Fact) -> None:
        self._rest(fact.time)
        self._state = "finished"
        if self.life is not None:
            self.life.status, self.life.num_output_tokens = fact.reason, fact.a

    def _rest(self, until: float) -> None:
        """Attribute the time up to an end that lies between steps or after the last recorded
        one."""
        if self.cursor is None or self.cursor >= until:
            return
        if self._state == "finished":
            self._cut(until, Cause.DELIVERY)
        elif self._state == "running":
            self._cut(until, Cause.UNDER_WAY)
        elif self._state == "waiting":
            reason = Wait.GRAMMAR if self._compiles else self._now_waits[0]
            self._cut(until, Cause.QUEUED, reason=reason)
        elif self._state:
            self._cut(until, Cause.PREEMPTED, self._lost)
        else:
            self._cut(until, Cause.INTAKE)

    def _close(self) -> None:
        if self.end is not None:
            self._rest(self.end)


def _beside(step: Step) -> Cause:
    """The cause for a decode in this step. A few prompt tokens do not make a step slow, so they do
    not count."""
    prompt = sum(chunk.tokens for chunk in step.chunks.values())
    mostly = prompt > len(step.scheduled) - len(step.chunks)
    return Cause.DECODE_BESIDE_PREFILL if mostly else Cause.DECODE


def _life_of(fact: Fact) -> Life:
    return Life(fact.request, fact.time, fact.a, fact.b, fact.c)
