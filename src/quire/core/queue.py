"""Containers of waiting requests from which any entry can be cancelled cheaply. They know no
policy."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from quire.core.request import Request


class Line:
    """A queue with two ends. All operations are O(1), also cancelling any entry."""

    # A plain dict would do, but finding its first key walks over all keys that were deleted
    # before it: emptying a long queue from the front would cost O(n^2).
    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def append(self, request: Request) -> None:
        """Put at the end."""
        self._requests[request.request_id] = request

    def prepend(self, request: Request) -> None:
        """Put in front."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def first(self) -> Request:
        """The request in front, which stays there."""
        return next(iter(self._requests.values()))

    def discard(self, request: Request) -> bool:
        """Take a request out, wherever it stands; False if it is not here."""
        return self._requests.pop(request.request_id, None) is not None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class Heap:
    """Requests by key, smallest first; equal keys in order of insertion.

    A cancelled entry stays in the heap until it comes to the top, so cancelling is O(1). When more
    than half of the entries are dead the heap is rebuilt, so that they cannot pile up.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, Request]] = []
        self._alive: dict[str, int] = {}
        # serial number of the entry of each request: a request that comes back gets a new one
        self._serial = itertools.count()

    def push(self, key: Any, request: Request) -> None:
        """Add a request; smaller keys come first."""
        serial = self._alive[request.request_id] = next(self._serial)
        heapq.heappush(self._entries, (key, serial, request))

    def first(self) -> Request:
        """The request with the smallest key, which stays there."""
        while not self._is_alive(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][2]

    def discard(self, request: Request) -> bool:
        """Take a request out, wherever it stands; False if it is not here."""
        if self._alive.pop(request.request_id, None) is None:
            return False
        if len(self._entries) > 2 * len(self._alive) + 64:
            self._entries = [e for e in self._entries if self._is_alive(e)]
            heapq.heapify(self._entries)
        return True

    def _is_alive(self, entry: tuple[Any, int, Request]) -> bool:
        return self._alive.get(entry[2].request_id) == entry[1]

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[Request]:
        # Serial numbers differ, so requests are never compared.
        return (entry[2] for entry in sorted(self._entries) if self._is_alive(entry))
