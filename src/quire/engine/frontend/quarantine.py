"""Which requests a new core takes over when its predecessor died, and which one is to blame.

A request may kill every core that works on it: a prompt that meets a bug of a kernel, say. Replayed
again and again it would take everybody with it. Suspected is who was handed over to a core and got
nothing more from it before it died, too: who gets a token has not killed the core, at least not
this time. One suspect alone is to blame. Of several, half are tried at a time while the others wait
here; who gets a token is cleared. So the culprit of 64 is found after 6 further deaths, and all
others go on.

Knows no cores and no text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.frontend.listeners import Listener
from quire.engine.messages import EngineCoreRequest
from quire.errors import POISON
from quire.logger import get_logger
from quire.outputs import FinishReason

logger = get_logger(__name__)


class Quarantine(Listener):
    """Keeps suspects apart. All ids are internal ones of completions."""

    def __init__(self) -> None:
        self._silent: set[str] = set()
        # were handed over to the core that is there, and got nothing from it yet
        self._trial: set[str] = set()
        # suspects that the core has now; all of them are silent
        self._held: list[list[EngineCoreRequest]] = []
        # groups of suspects that wait for their turn, the next one last

    def stepped(self, outputs: Sequence[EngineCoreOutput], stats: StepStats | None) -> None:
        """Clear whoever got an output."""
        if self._silent:
            self._clear([output.request_id for output in outputs])

    def closed(self, internal_ids: Sequence[str]) -> None:
        """Forget completions that ended on this side."""
        if self._silent or self._held:
            self._clear(internal_ids)
            ended = set(internal_ids)
            groups = ([r for r in group if r.request_id not in ended] for group in self._held)
            self._held = [group for group in groups if group]

    def _clear(self, ids: Sequence[str]) -> None:
        self._silent.difference_update(ids)
        self._trial.difference_update(ids)

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
        suspects = [r for r in unfinished if r.request_id in (self._trial or self._silent)]
        if has_worked and len(suspects) == 1:
            outputs = [_poison(suspects[0])]
            # Those who waited need not go on one by one: mostly there is one culprit.
            self._held = [[request for group in reversed(self._held) for request in group]]
            self._trial = set()
        elif has_worked and suspects:
            half = len(suspects) // 2
            self._held.append(suspects[half:])
            self._trial = {r.request_id for r in suspects[:half]}
            logger.warning(
                "the engine core died again, and %d requests may be the cause: trying %d of them "
                "while the others wait",
                len(suspects),
                half,
            )
        waiting = self._waiting()
        gone = {output.request_id for output in outputs} | waiting
        now = [r for r in unfinished if r.request_id not in gone]
        self._silent = {r.request_id for r in now}
        return now + self.released(), outputs

    def released(self) -> list[EngineCoreRequest]:
        """The next group of suspects, if those before it are cleared. The core is to get them."""
        if self._trial or not self._held:
            return []
        group = self._held.pop()
        self._trial = {r.request_id for r in group}
        self._silent |= self._trial
        return group

    def _waiting(self) -> set[str]:
        return {request.request_id for group in self._held for request in group}

    def check_integrity(self, unfinished: Collection[str]) -> None:
        """Check that nobody is kept who has ended, and that nobody waits for nothing.

        Raises:
            AssertionError: somebody is or does; a bug.
        """
        waiting = self._waiting()
        assert self._trial <= self._silent, "who is tried has had no output"
        assert waiting | self._trial <= set(unfinished), "who is suspected is unfinished"
        assert self._trial or not waiting, "somebody waits for nobody"
        assert self._silent.isdisjoint(waiting), "who waits is not in the core"


def _poison(request: EngineCoreRequest) -> EngineCoreOutput:
    logger.error(
        "request %s is taken out: every engine core that worked on it died", request.external_id
    )
    return EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=POISON)
