"""A batch that has been scheduled and whose result is not there yet, where an executor takes more
than one at once.

All ranks run batches in the order in which they were submitted. Therefore blocks that a batch in
flight writes may be given to a request of a later one: it writes, and reads, after it. What must be
remembered is which results no longer count, and how to take the batch back. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.core.kv.swap import Swapped


class Flight:
    """Notes on one batch in flight.

    Args:
        step: Number of the step.
        started: When it was begun, in seconds on the scheduler's clock.
        pool_step: The pool's step before it: what was registered up to then is computed by
            batches submitted earlier.
        swapped: What the second tier kept for requests before it.
        records: The scheduler's records up to the end of its scheduling, and the ids of the
            requests first named in them: they leave with the step's statistics.
    """

    __slots__ = ("dropped", "names", "pool_step", "records", "started", "step", "swapped")

    def __init__(
        self,
        step: int,
        started: float,
        pool_step: int,
        swapped: Mapping[str, Swapped],
        records: tuple[bytes, list[tuple[int, str]]],
    ) -> None:
        self.step = step
        self.started = started
        self.pool_step = pool_step
        self.swapped = swapped
        self.records, self.names = records
        self.dropped: list[str] = []
        """Requests that have ended, or lost their place, since: their part of the result is not
        used. One that comes back computes the same tokens again."""
