"""Who hears what becomes of requests: the events, and the table of those who listen.

A listener keeps books of its own (journal, queue, records) or tells others (traces, log). The
order of the table is the order in which they hear: see `FrontEnd`. Knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.meter import Entry
from quire.engine.frontend.processed_input import ProcessedInput
from quire.engine.messages import EngineCoreRequest
from quire.errors import QuireError
from quire.logger import get_logger
from quire.params import PoolingParams, SamplingParams
from quire.utils.signals import pass_on_signals

logger = get_logger(__name__)

Hear = Callable[..., None]
AnyParams = SamplingParams | PoolingParams | CheckedParams


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A request that has passed every check."""

    request_id: str
    """The caller's."""
    processed: ProcessedInput
    params: AnyParams
    """As the caller gave them."""
    trace_headers: Mapping[str, str] | None
    entry: Entry | None = None
    """Of whoever is charged for it, if anybody is."""
    continues: bool = False
    """It is a further step of what was accepted before."""

    @property
    def requests(self) -> list[EngineCoreRequest]:
        """Its completions, one or more."""
        return self.processed.requests


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A request of which nothing was queued."""

    request_id: str
    params: AnyParams
    trace_headers: Mapping[str, str] | None
    arrival: float
    """Seconds on the engine's clock."""
    error: QuireError


class Listener:
    """Overrides the events it wants to hear; it is not called for the others."""

    def accepted(self, accepted: AcceptedRequest) -> None:
        """A request was accepted. The core does not have it yet."""

    def refused(self, refused: RefusedRequest) -> None:
        """A request was refused."""

    def stepped(self, outputs: Sequence[EngineCoreOutput], stats: StepStats | None) -> None:
        """A step has produced `outputs`; no caller has seen them yet. Some may be of completions
        that have ended meanwhile."""

    def closed(self, internal_ids: Sequence[str]) -> None:
        """Completions have ended on this side: by an abort, a stop string or a fault in their
        output. Ids that nobody knows may be among them."""

    def aborted(self, request_id: str) -> None:
        """A request was ended from outside; its completions were told by `closed`."""

    def failed(self, error: QuireError) -> None:
        """The engine is gone, and every request with it."""


class ListenerTable:
    """Calls the listeners in their order, each event only those who override it.

    Only `accepted` passes on what a listener raises: the request is refused then. What has happened
    cannot be refused, so the other listeners hear of it all the same; the fault is logged and
    counted.

    Args:
        listeners: In the order in which they hear.
    """

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.num_faults = 0
        """Times that a listener raised where nobody could refuse anything."""
        self.accepted = _in_turn(_who_hear(listeners, "accepted"))
        self.refused = self._shielded(_who_hear(listeners, "refused"))
        self.stepped = self._shielded(_who_hear(listeners, "stepped"))
        self.closed = self._shielded(_who_hear(listeners, "closed"))
        self.aborted = self._shielded(_who_hear(listeners, "aborted"))
        self.failed = self._shielded(_who_hear(listeners, "failed"))

    def _shielded(self, hearing: Sequence[Hear]) -> Hear:
        def tell(*what: Any) -> None:
            for hear in hearing:
                try:
                    hear(*what)
                except Exception as error:
                    pass_on_signals(error)
                    self.num_faults += 1
                    logger.exception("%s failed", getattr(hear, "__qualname__", hear))

        return tell


def _who_hear(listeners: Sequence[Listener], event: str) -> list[Hear]:
    silent = getattr(Listener, event)
    return [getattr(one, event) for one in listeners if getattr(type(one), event) is not silent]


def _in_turn(hearing: Sequence[Hear]) -> Hear:
    def tell(*what: Any) -> None:
        for hear in hearing:
            hear(*what)

    return tell
