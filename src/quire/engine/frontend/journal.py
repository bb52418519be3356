"""The journal: everything needed to finish each accepted request on a new engine core.

A token is written here before it is sent to the caller. Replaying an entry means submitting its
request again with the output so far; because sampling depends only on (seed, position) and the
kernels on nothing but the tokens, the continuation has the same bytes. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.core.output import EngineCoreOutput
from quire.engine.messages import EngineCoreRequest


class JournalEntry:
    """One accepted completion: the request as sent, and its output so far."""

    __slots__ = ("output_token_ids", "request")

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.output_token_ids = list(request.output_token_ids)


class Journal:
    """Entries of all unfinished completions, by internal request id."""

    def __init__(self) -> None:
        self._entries: dict[str, JournalEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, requests: Iterable[EngineCoreRequest]) -> None:
        """Accept requests."""
        for request in requests:
            self._entries[request.request_id] = JournalEntry(request)

    def record(self, outputs: Iterable[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Write new tokens down, and close entries that ended.

        Returns:
            The outputs of requests the journal knows; others were aborted meanwhile.
        """
        known = []
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None:
                continue
            entry.output_token_ids += output.new_token_ids
            if output.finish_reason is not None:
                del self._entries[output.request_id]
            known.append(output)
        return known

    def close(self, request_ids: Iterable[str]) -> None:
        """Forget completions that were aborted."""
        for request_id in request_ids:
            self._entries.pop(request_id, None)

    def set_priority(self, request_ids: Iterable[str], priority: int) -> None:
        """Unfinished completions have another priority from now on."""
        for request_id in request_ids:
            if entry := self._entries.get(request_id):
                entry.request.priority = priority

    def replay(self) -> list[EngineCoreRequest]:
        """The unfinished requests with their output, in order of acceptance, for a new core."""
        return [
            msgspec.structs.replace(e.request, output_token_ids=list(e.output_token_ids))
            for e in self._entries.values()
        ]
