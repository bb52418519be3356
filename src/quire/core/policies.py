"""Scheduling policies: which request is admitted next, and which gives way when room runs out.

A policy is one class: it holds the waiting requests and answers the scheduler's questions. Their
names are the rows of `POLICIES` in `config/scheduler.py`; `--scheduler-cls` names any other
subclass of `Policy`. Adding, finding and cancelling cost O(1) or O(log n), however many requests
wait.

A policy knows requests and seconds; it knows no blocks, budgets or batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from quire.config.scheduler import SchedulerConfig
from quire.core.queue import Heap, Line
from quire.core.request import Request

CountTokens = Callable[[Request], int]


def count_all(request: Request) -> int:
    """Tokens of a request, cached or not."""
    return request.num_tokens


class Policy(ABC):
    """The waiting requests of one scheduler, in the order of a policy.

    Args:
        config: Limits; a policy reads its own options from it.
        count_uncached: Tokens of a request that are in no KV block now. Costs a hash per block of
            the prompt, so call it once per request.
    """

    waiting_first: ClassVar[bool] = False
    """Admit waiting requests before the running ones get their tokens."""
    default_aging_seconds: ClassVar[float] = 0.0
    """What `scheduler_aging_seconds` is if it is not given; 0: no aging."""

    def __init__(self, config: SchedulerConfig, count_uncached: CountTokens = count_all) -> None:
        self.config = config
        self.count_uncached = count_uncached
        aging = config.scheduler_aging_seconds
        self.aging_seconds = self.default_aging_seconds if aging is None else aging
        self.displaces = False
        """Whether `may_displace` can ever be true: asking costs a walk over `running`."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Put a new request in its place; its `queued_ts` is now."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Put back a request that was preempted."""

    @abstractmethod
    def peek_request(self, now: float) -> Request:
        """The next to be admitted, left in the queue. Asked only while someone waits.

        Args:
            now: Seconds on the clock that `queued_ts` is read from.
        """

    @abstractmethod
    def remove_request(self, request: Request) -> None:
        """Take a request out, wherever it stands: it was cancelled."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """All waiting requests. The order does not matter, except that the preempted ones come in
        the order in which they are to return."""

    def admit_request(self, request: Request) -> None:
        """Take out the request that `peek_request` gave, because it is admitted."""
        self.remove_request(request)

    def change_priority(self, request: Request, priority: int) -> None:
        """Give a waiting request another priority; it keeps its place unless that counts here."""
        request.priority = priority

    def finish_request(self, request: Request) -> None:
        """Called for each request that ended, whether it ran or waited; its output is complete."""
        return

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """The request that loses its blocks when a running one finds none.

        Args:
            running: In order of admission; not empty.
        """
        return running[-1]

    def may_displace(self, waiting: Request, running: Request, now: float) -> bool:
        """Whether a waiting request may take the place of a running one when there is no room.

        Asked only if `displaces` is set. When the running one has been put back it must come after
        the waiting one: otherwise the two would displace each other for ever.
        """
        return False


class FCFS(Policy):
    """First come, first served; a preempted request goes to the front."""

    def __init__(self, config: SchedulerConfig, count_uncached: CountTokens = count_all) -> None:
        super().__init__(config, count_uncached)
        self._line = Line()

    def add_request(self, request: Request) -> None:
        """Append."""
        self._line.append(request)

    def prepend_request(self, request: Request) -> None:
        """Put in front."""
        self._line.prepend(request)

    def peek_request(self, now: float) -> Request:
        """The one in front."""
        return self._line.first()

    def remove_request(self, request: Request) -> None:
        """Take out."""
        self._line.discard(request)

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)


class PrefillFirst(FCFS):
    """First come, first served, and prompts before decodes: first tokens come sooner, running
    requests stall meanwhile. Admission leaves the running ones room for their next tokens."""

    waiting_first = True


class Ordered(Policy):
    """By a key that is fixed when a request is queued. Requests that have waited `aging_seconds` go
    first, the oldest of them first, so that none waits for ever."""

    def __init__(self, config: SchedulerConfig, count_uncached: CountTokens = count_all) -> None:
        super().__init__(config, count_uncached)
        self._by_key = Heap()
        self._by_age = Heap()
        self._returned = Line()

    @abstractmethod
    def key(self, request: Request) -> Any:
        """What the queue is ordered by, smallest first."""

    def add_request(self, request: Request) -> None:
        """Push."""
        self._by_key.push(self.key(request), request)
        if self.aging_seconds:
            self._by_age.push(request.queued_ts, request)

    def prepend_request(self, request: Request) -> None:
        """Before all others: it has had its turn once and holds output."""
        self._returned.prepend(request)

    def peek_request(self, now: float) -> Request:
        """A preempted request, else one that has waited too long, else the smallest key."""
        if self._returned:
            return self._returned.first()
        if self.aging_seconds:
            oldest = self._by_age.first()
            if self.is_aged(oldest, now):
                return oldest
        return self._by_key.first()

    def is_aged(self, request: Request, now: float) -> bool:
        """Whether a request has waited so long that its key no longer counts."""
        return bool(self.aging_seconds) and now - request.queued_ts >= self.aging_seconds

    def remove_request(self, request: Request) -> None:
        """Take out."""
        if not self._returned.discard(request):
            self._by_key.discard(request)
            self._by_age.discard(request)

    def __len__(self) -> int:
        return len(self._returned) + len(self._by_key)

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        yield from self._by_key


class Priority(Ordered):
    """Lower `priority` first, ties by arrival. The least urgent request gives way to running ones,
    and with `priority_preemption` also to a waiting one."""

    def __init__(self, config: SchedulerConfig, count_uncached: CountTokens = count_all) -> None:
        super().__init__(config, count_uncached)
        self.displaces = config.priority_preemption

    def key(self, request: Request) -> tuple[int, float, str]:
        """Lower value, then arrival, then id."""
        return (request.priority, request.arrival_time, request.request_id)

    def prepend_request(self, request: Request) -> None:
        """Back to its place by urgency."""
        self.add_request(request)

    def change_priority(self, request: Request, priority: int) -> None:
        """To its new place."""
        self.remove_request(request)
        request.priority = priority
        self.add_request(request)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """The least urgent, latest."""
        return max(running, key=self.key)

    def may_displace(self, waiting: Request, running: Request, now: float) -> bool:
        """If it is strictly more urgent, and the running one has not aged: that would be displaced
        again and again and never come to its end."""
        return waiting.priority < running.priority and not self.is_aged(running, now)


class ShortestJobFirst(Ordered):
    """Fewest tokens to compute first, as counted when the request was queued: prompt tokens that
    were in the prefix cache do not count. Gives the lowest mean time to first token."""

    default_aging_seconds = 30.0

    def key(self, request: Request) -> int:
        """Uncached prompt tokens."""
        return self.count_uncached(request)


class LongestJobFirst(ShortestJobFirst):
    """Most tokens to compute first: fills batches well, at the cost of short requests."""

    def key(self, request: Request) -> int:
        """Uncached prompt tokens, most first."""
        return -self.count_uncached(request)


class Share:
    """One client's waiting requests and what it may still spend."""

    __slots__ = ("costs", "deficit", "line")

    def __init__(self, deficit: int) -> None:
        self.deficit = deficit
        """Tokens it may be served before its turn ends; below 0, tokens it has had too many."""
        self.line = Line()
        self.costs: dict[str, int] = {}


class Fair(Policy):
    """Deficit round robin over clients (Shreedhar and Varghese, 1995), in tokens.

    Clients that have something waiting stand in a ring. The one in front is served while its
    deficit covers the next request's uncached prompt tokens; then it gets `quantum` more and goes
    to the back. Output is charged when a request ends, because nobody knows it before. Within a
    client: first come, first served. A client with nothing waiting is forgotten.
    """

    quantum: ClassVar[int] = 512
    """Tokens per turn. Larger is coarser."""

    def __init__(self, config: SchedulerConfig, count_uncached: CountTokens = count_all) -> None:
        super().__init__(config, count_uncached)
        self._ring: OrderedDict[str, Share] = OrderedDict()
        self._returned = Line()
        self._count = 0

    def add_request(self, request: Request) -> None:
        """To the end of its client's line."""
        share = self._ring.get(request.client)
        if share is None:
            share = self._ring[request.client] = Share(self.quantum)
        share.line.append(request)
        share.costs[request.request_id] = self.count_uncached(request)
        self._count += 1

    def prepend_request(self, request: Request) -> None:
        """Before all others: it has been paid for."""
        self._returned.prepend(request)

    def peek_request(self, now: float) -> Request:
        """A preempted one, else the next of the first client that can pay for it.

        A turn that serves nobody adds `quantum` tokens of credit, and each such token is spent
        on a token computed, so the turns are few: O(cost / quantum) per request.
        """
        if self._returned:
            return self._returned.first()
        while True:
            client, share = next(iter(self._ring.items()))
            request = share.line.first()
            if share.deficit >= share.costs[request.request_id]:
                return request
            share.deficit += self.quantum
            self._ring.move_to_end(client)

    def admit_request(self, request: Request) -> None:
        """Charge the prompt."""
        share = self._ring.get(request.client)
        if share is not None:
            share.deficit -= share.costs.get(request.request_id, 0)
        self.remove_request(request)

    def finish_request(self, request: Request) -> None:
        """Charge the output."""
        share = self._ring.get(request.client)
        if share is not None:
            share.deficit -= request.num_output_tokens

    def remove_request(self, request: Request) -> None:
        """Take out; nothing is charged."""
        if self._returned.discard(request):
            return
        share = self._ring[request.client]
        share.line.discard(request)
        del share.costs[request.request_id]
        self._count -= 1
        if not share.line:
            del self._ring[request.client]

    def __len__(self) -> int:
        return len(self._returned) + self._count

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        for share in self._ring.values():
            yield from share.line
