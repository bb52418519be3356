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
from quire.engine.frontend.processed_input import ProcessedInput
from quire.engine.messages import EngineCoreRequest
from quire.errors import QuireError
from quire.params import PoolingParams, SamplingParams

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

    Args:
        listeners: In the order in which they hear.
    """

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.accepted = _of(listeners, "accepted")
        self.refused = _of(listeners, "refused")
        self.stepped = _of(listeners, "stepped")
        self.closed = _of(listeners, "closed")
        self.aborted = _of(listeners, "aborted")
        self.failed = _of(listeners, "failed")


def _of(listeners: Sequence[Listener], event: str) -> Callable[..., None]:
    """One function that calls whoever listens to an event."""
    silent = getattr(Listener, event)
    hearing: list[Callable[..., None]] = [
        getattr(one, event) for one in listeners if getattr(type(one), event) is not silent
    ]

    if len(hearing) == 1:
        return hearing[0]

    def tell(*what: Any) -> None:
        for hear in hearing:
            hear(*what)

    return tell
