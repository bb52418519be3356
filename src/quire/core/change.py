"""What taking a change of the books back needs (`quire.core.rules.undo`). Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from quire.core.facts import FactMark
from quire.core.flight import Flight
from quire.core.kv.swap import Swapped
from quire.core.request import Request, RequestStatus

_tokens_of = attrgetter("all_token_ids")


class Change:
    """Notes on how the books stood, as few as can be: they are taken for every step.

    Args:
        running: The requests that run.
        facts: From `FactLog.mark`.
        pool_counts: The counters of blocks at the last statistics.
        pool_step: The pool's step.
        swapped: From `SwapSpace.mark`.
        in_flight: Batches whose result is not there: they are taken back, too.
    """

    __slots__ = (
        "added",
        "admitted",
        "ended",
        "facts",
        "in_flight",
        "num_tokens",
        "pool_counts",
        "pool_step",
        "ran",
        "swapped",
    )

    def __init__(
        self,
        running: list[Request],
        facts: FactMark,
        pool_counts: tuple[int, int, int, int],
        pool_step: int,
        swapped: dict[str, Swapped],
        in_flight: Sequence[Flight] = (),
    ) -> None:
        self.ran = running[:]
        """The requests that ran."""
        self.num_tokens = list(map(len, map(_tokens_of, running)))
        """Of each of them."""
        self.admitted: list[tuple[Request, RequestStatus, int]] = []
        """The requests admitted since, each with the status in which it waited and its number of
        tokens."""
        self.added: list[Request] = []
        """The requests queued since."""
        self.ended: dict[str, RequestStatus] = {}
        """The requests that somebody outside wanted to end, and how: that is not taken back."""
        self.facts = facts
        self.pool_counts = pool_counts
        self.pool_step = pool_step
        self.swapped = swapped
        self.in_flight = in_flight
