"""The journal: everything needed to finish each accepted request on a new engine core.

A token is written here before it is sent to the caller. Replaying an entry means submitting its
request again with the output so far; because sampling depends only on (seed, position) and the
kernels on nothing but the tokens, the continuation has the same bytes. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.frontend.listeners import AcceptedRequest, Listener
from quire.engine.messages import EngineCoreRequest


class JournalEntry:
    """One accepted completion: the request as sent, and its output so far."""

    __slots__ = ("output_token_ids", "request")

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.output_token_ids = list(request.output_token_ids)


class Journal(Listener):
    """Entries of all unfinished completions, by internal request id. The first of the listeners,
    so that no other, and no caller, has a token that it has not."""

    def __init__(self) -> None:
        self._entries: dict[str, JournalEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def accepted(self, accepted: AcceptedRequest) -> None:
        """Open entries for a request."""
        self.open(accepted.requests)

    def stepped(self, outputs: Sequence[EngineCoreOutput], stats: StepStats | None) -> None:
        """Write down what a step produced."""
        self.record(outputs)

    def closed(self, internal_ids: Sequence[str]) -> None:
        """Forget completions that ended on this side."""
        self.close(internal_ids)

    def open(self, requests: Iterable[EngineCoreRequest]) -> None:
        """Accept requests."""
        for request in requests:
            self._entries[request.request_id] = JournalEntry(request)

    def record(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Write new tokens down, and close entries that ended. Outputs of requests without an
        entry, which were aborted meanwhile, are left alone."""
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None:
                continue
            entry.output_token_ids += output.new_token_ids
            if output.finish_reason is not None:
                del self._entries[output.request_id]

    def close(self, request_ids: Iterable[str]) -> None:
        """Forget completions that were aborted."""
        for request_id in request_ids:
            self._entries.pop(request_id, None)

    def set_priority(self, request_id: str, priority: int) -> None:
        """A completion has another priority from now on, unless it has ended."""
        if entry := self._entries.get(request_id):
            entry.request.priority = priority

    def tokens(self) -> dict[str, list[int]]:
        """Output so far of each unfinished completion, by internal id."""
        return {name: entry.output_token_ids for name, entry in self._entries.items()}

    def replay(self) -> list[EngineCoreRequest]:
        """The unfinished requests with their output, in order of acceptance, for a new core."""
        return [
            msgspec.structs.replace(e.request, output_token_ids=list(e.output_token_ids))
            for e in self._entries.values()
        ]
