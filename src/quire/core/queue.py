"""Waiting queues: who is next. One class per policy; adding, taking and cancelling are cheap."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from quire.core.request import Request


class RequestQueue(Protocol):
    """What the scheduler needs of a waiting queue."""

    def add_request(self, request: Request) -> None:
        """Put a new request in its place."""
        ...

    def prepend_request(self, request: Request) -> None:
        """Put back a request that was preempted or skipped."""
        ...

    def peek_request(self) -> Request:
        """The next request, left in the queue."""
        ...

    def pop_request(self) -> Request:
        """Take the next request."""
        ...

    def remove_request(self, request: Request) -> None:
        """Cancel a request, wherever it stands."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue:
    """First come, first served. A preempted request goes to the front. All operations O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add_request(self, request: Request) -> None:
        """Append."""
        self._requests[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        """Put in front."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek_request(self) -> Request:
        """The oldest."""
        return next(iter(self._requests.values()))

    def pop_request(self) -> Request:
        """Take the oldest."""
        return self._requests.popitem(last=False)[1]

    def remove_request(self, request: Request) -> None:
        """Cancel."""
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


def priority_key(request: Request) -> tuple[int, float, str]:
    """Order of the `priority` policy: lower priority value, then arrival, then id."""
    return (request.priority, request.arrival_time, request.request_id)


class PriorityQueue:
    """Most urgent first. Cancelled entries stay in the heap until they surface, so cancelling
    is O(1) and the heap is rebuilt when more than half of it is dead."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str]] = []
        self._requests: dict[str, Request] = {}

    def add_request(self, request: Request) -> None:
        """Push."""
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, priority_key(request))

    prepend_request = add_request

    def peek_request(self) -> Request:
        """The most urgent."""
        while self._heap[0][2] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][2]]

    def pop_request(self) -> Request:
        """Take the most urgent."""
        request = self.peek_request()
        heapq.heappop(self._heap)
        del self._requests[request.request_id]
        return request

    def remove_request(self, request: Request) -> None:
        """Cancel."""
        del self._requests[request.request_id]
        if len(self._heap) > 2 * len(self._requests) + 64:
            self._heap = [priority_key(r) for r in self._requests.values()]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=priority_key))


QUEUES: dict[str, type[FCFSQueue] | type[PriorityQueue]] = {
    "fcfs": FCFSQueue,
    "priority": PriorityQueue,
}
"""Queue class of each scheduling policy."""
