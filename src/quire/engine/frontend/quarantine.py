"""Which requests a new core takes over when its predecessor died, and which one is to blame.

A request may kill every core that works on it: a prompt that meets a bug of a kernel, say. Replayed
again and again, it would take everybody with it. Suspected is who was handed over to a core and got
nothing from it before it died, too. Of several suspects half are tried at a time while the others
wait here, and who gets a token is cleared; so the culprit of 64 is found after a handful of deaths,
and all others go on. The last suspect is taken out once two cores in a row died without giving it
anything, the second one of them with nobody else in it: a single death may have come from outside,
and others may have caused it.

Knows no cores and no text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.frontend.listeners import Listener
from quire.engine.messages import EngineCoreRequest
from quire.errors import POISON
from quire.logger import get_logger
from quire.outputs import FinishReason

logger = get_logger(__name__)

ENOUGH_DEATHS: Final = 2
"""Deaths in a row, without a token in between, for which a request alone is to blame."""


class Quarantine(Listener):
    """Keeps suspects apart. All ids are internal ones of completions."""

    def __init__(self) -> None:
        self._handed: dict[str, int] = {}
        # what the core took over from its predecessor, with the number of output tokens then
        self._deaths: dict[str, int] = {}
        # cores in a row that died without giving it anything
        self._trial: set[str] = set()
        # suspects that the core has now, and that have got nothing from it yet
        self._held: list[list[EngineCoreRequest]] = []
        # groups of suspects that wait for their turn, the next one last

    def stepped(self, outputs: Sequence[EngineCoreOutput], stats: StepStats | None) -> None:
        """Clear whoever got an output."""
        if self._trial:
            self._trial.difference_update([output.request_id for output in outputs])

    def closed(self, internal_ids: Sequence[str]) -> None:
        """Forget completions that ended on this side."""
        if self._trial or self._held:
            self._trial.difference_update(internal_ids)
            ended = set(internal_ids)
            groups = ([r for r in group if r.request_id not in ended] for group in self._held)
            self._held = [group for group in groups if group]

    def hand_over(
        self, unfinished: Sequence[EngineCoreRequest], has_worked: bool
    ) -> tuple[list[EngineCoreRequest], list[EngineCoreOutput]]:
        """A core died, and another is there.

        Args:
            unfinished: All unfinished completions with their output so far, in order.
            has_worked: Whether the core that died was ready to work. Nobody is to blame if it died
                while it loaded.

        Returns:
            What the new core gets now, and the last outputs of those who get no other.
        """
        outputs: list[EngineCoreOutput] = []
        if has_worked:
            outputs = self._judge(unfinished)
        kept_back = {request.request_id for group in self._held for request in group}
        kept_back.update(output.request_id for output in outputs)
        now = [r for r in unfinished if r.request_id not in kept_back]
        now += self.released()
        self._handed = {r.request_id: len(r.output_token_ids) for r in now}
        return now, outputs

    def _judge(self, unfinished: Sequence[EngineCoreRequest]) -> list[EngineCoreOutput]:
        """Suspect, try and blame after a death; returns the last output of whoever is to blame."""
        waiting = {request.request_id for group in self._held for request in group}
        silent = [
            r
            for r in unfinished
            if r.request_id not in waiting
            and len(r.output_token_ids) == self._handed.get(r.request_id, 0)
        ]
        before, held = self._deaths, waiting & self._deaths.keys()
        self._deaths = {r.request_id: before.get(r.request_id, 0) + 1 for r in silent}
        self._deaths |= {one: before[one] for one in held}
        tried = self._trial or self._handed.keys()
        suspects = [r for r in silent if r.request_id in tried]
        if len(suspects) == 1:
            one = suspects[0]
            self._trial = {one.request_id}
            if self._deaths[one.request_id] < ENOUGH_DEATHS:
                return []
            others = [r for r in unfinished if r.request_id not in waiting | self._trial]
            if others:
                # One of these may have killed the core meanwhile, so the suspect is tried alone.
                self._held.append(others)
                return []
            # Those who waited need not go on group by group: mostly there is one culprit.
            self._held = [[r for group in reversed(self._held) for r in group]]
            self._trial = set()
            return [_poison(one)]
        if suspects:
            half = len(suspects) // 2
            self._trial = {r.request_id for r in suspects[:half]}
            self._held.append(suspects[half:])
            logger.warning(
                "the engine core died again, and %d requests may be the cause: trying %d of them "
                "while the others wait",
                len(suspects),
                half,
            )
        return []

    def released(self) -> list[EngineCoreRequest]:
        """The next group of suspects, if those before it are cleared. The core is to get them."""
        while self._held and not self._trial:
            group = self._held.pop()
            self._trial = {request.request_id for request in group}
            self._handed |= {r.request_id: len(r.output_token_ids) for r in group}
            if group:
                return group
        return []

    def set_priority(self, request_id: str, priority: int) -> None:
        """Give a suspect that waits here another priority: the core, which does not know it now,
        gets it with this one. Other ids are ignored."""
        for group in self._held:
            for request in group:
                if request.request_id == request_id:
                    request.priority = priority

    def check_integrity(self, unfinished: Collection[str]) -> None:
        """Check that nobody is kept who has ended, and that nobody waits for nothing.

        Raises:
            AssertionError: somebody is or does; a bug.
        """
        waiting = {request.request_id for group in self._held for request in group}
        assert waiting | self._trial <= set(unfinished), "who is suspected is unfinished"
        assert self._trial or not waiting, "somebody waits for nobody"
        assert self._trial.isdisjoint(waiting), "who waits is not in the core"


def _poison(request: EngineCoreRequest) -> EngineCoreOutput:
    logger.error(
        "request %s is taken out: every engine core that worked on it died", request.external_id
    )
    return EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=POISON)
