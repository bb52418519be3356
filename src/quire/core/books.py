"""The scheduler's books: which requests there are, where each stands, what it holds.

The books are state and the few moves that keep it whole; what should happen in a step is decided
by the rules (`quire.core.rules`), which read and change the books. They know no tensors, no text,
and nothing of who calls the rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from quire.config.scheduler import SchedulerConfig
from quire.core.admission import DelayGate
from quire.core.change import Change
from quire.core.facts import FactKind, FactLog
from quire.core.flight import Flight
from quire.core.kv.manager import KVCacheManager
from quire.core.policy_loader import make_policy
from quire.core.request import Request, RequestStatus
from quire.core.swap_cost import SwapCost
from quire.utils.timing import Clock


class Books:
    """Queues, statuses, holdings, counters, records, and the change that is under way.

    Args:
        config: Limits and policy.
        kv: The KV cache manager; nobody else uses it.
        max_model_len: Longest prompt plus output, in tokens.
        clock: Monotonic time, for the records.
        num_lookahead_tokens: KV slots kept ready after a request's tokens, for drafts.
        max_in_flight: Batches that may be scheduled before the result of the first is there.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        max_model_len: int,
        clock: Clock,
        num_lookahead_tokens: int = 0,
        max_in_flight: int = 1,
    ) -> None:
        self.config = config
        self.kv = kv
        self.max_model_len = max_model_len
        self.clock = clock
        self.num_lookahead_tokens = num_lookahead_tokens
        self.requests: dict[str, Request] = {}
        """All requests that have not ended, by id."""
        self.aside: dict[str, Request] = {}
        """Requests that are left out of steps for a moment, by id; see `rules.aside`."""
        self.waiting = make_policy(config, self.count_uncached)
        self.running: list[Request] = []
        """In order of admission."""
        self.compiling: dict[str, Request] = {}
        """Requests whose grammar is being compiled, by id. They are not in `waiting` yet."""
        self.finished_req_ids: list[str] = []
        """Ended since the last step; handed to the worker with the next one."""
        self.step = 0
        """Number of the latest step."""
        self.facts = FactLog()
        self.swap_cost = SwapCost(config.preemption_mode)
        self.pool_counts = (0, 0, 0, 0)
        """Blocks allocated, freed, evicted and missed up to the last statistics."""
        self.max_running = config.max_num_seqs
        """How many may run at most: more than `max_num_seqs` if that was lowered meanwhile."""
        self.delay_gate: DelayGate | None = None
        """Holds waiting prompts back, if the configuration wants that."""
        self.restart_delay()
        self.change: Change | None = None
        """What is needed to take back what happens now; None: nothing will be taken back."""
        self.max_in_flight = max_in_flight
        self.in_flight: deque[Flight] = deque()
        """Batches whose result is not there, oldest first; always empty if there is one at a
        time."""
        self.landed: Flight | None = None
        """The one whose result is being applied."""
        self.doubt: Flight | None = None
        """One with a failure of which nobody can tell any more what it touched: everything in
        flight must be taken back."""

    # ---- moves -------------------------------------------------------------------------------

    def begin_change(self) -> None:
        """Remember what a change could move."""
        assert self.change is None, "one change at a time"
        swap, pool_step, swapped = self.kv.swap, self.kv.block_pool.step, {}
        if self.in_flight:
            # Taking back takes back these, too.
            pool_step = self.in_flight[0].pool_step
        if swap is not None:
            oldest = self.in_flight[0].swapped if self.in_flight else None
            swapped = swap.mark() if oldest is None else swap.still_kept(oldest)
        self.change = Change(
            self.running,
            facts=self.facts.mark(),
            pool_counts=self.pool_counts,
            pool_step=pool_step,
            swapped=swapped,
            in_flight=tuple(self.in_flight),
        )

    def queue(self, request: Request) -> None:
        """A new request waits."""
        request.length_limit = min(request.length_limit, self.max_model_len)
        self.requests[request.request_id] = request
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self.compiling[request.request_id] = request
            self.facts.compiles(request.number)
            return
        self.waiting.add_request(request)
        self.delay(request)

    def queue_compiled(self, request: Request) -> None:
        """The grammar of a request is compiled: it joins the queue as if it came now."""
        del self.compiling[request.request_id]
        request.status = RequestStatus.WAITING
        self.facts.at(self.clock.now())
        self.facts.compiles(request.number, done=True)
        self.waiting.add_request(request)
        self.delay(request)

    def end(self, request: Request) -> None:
        """A request has ended, as its status says: let go of everything it holds, except its
        place in `running` (see `drop_finished`)."""
        self.facts.add(
            FactKind.FINISHED,
            request.number,
            request.status,
            a=request.num_output_tokens,
            b=self.kv.num_blocks_of(request.request_id),
        )
        self.drop_from_flights(request)
        # Drafts, accepted after the end or not judged yet, are no tokens of the request.
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
        failed = request.status is RequestStatus.FINISHED_ERROR
        self.kv.free(request, keep_tail=not failed)
        if self.kv.swap is not None:
            self.kv.swap.drop(request.request_id)
        self.waiting.finish_request(request)
        self.finished_req_ids.append(request.request_id)
        del self.requests[request.request_id]

    def drop_from_flights(self, request: Request) -> None:
        """What batches in flight compute for a request does not count any more."""
        for flight in self.in_flight:
            flight.dropped.append(request.request_id)

    def take_records(self) -> tuple[bytes, list[tuple[int, str]]]:
        """The records that leave with the statistics of the step just applied, and the ids of
        the requests first named in them.

        With other batches in flight these are the records of scheduling and applying this very
        step. Those made between steps stay for a later one: they may tell of requests that a
        batch in flight has admitted.
        """
        landed, self.landed = self.landed, None
        if landed is None:
            return self.facts.take()
        records, names = self.facts.take(of_step=bool(self.in_flight))
        return landed.records + records, landed.names + names

    def drop_finished(self) -> None:
        """Ended requests leave `running`: once for all of them, because it costs a walk."""
        self.running = [r for r in self.running if not r.status.is_finished]

    def restart_delay(self) -> None:
        """Nobody waits, as far as the delay that batches prompts is concerned."""
        factor = self.config.scheduler_delay_factor
        self.delay_gate = DelayGate(factor) if factor else None

    def delay(self, request: Request) -> None:
        """A request waits for the first time."""
        if self.delay_gate is not None:
            self.delay_gate.add(request)

    # ---- facts -------------------------------------------------------------------------------

    def count_uncached(self, request: Request) -> int:
        """Tokens of a request that are in no KV block now; see `Policy`."""
        return request.num_tokens - self.kv.get_computed_blocks(request)[1]

    def check_integrity(self) -> None:
        """Check that every request stands in one place with the status and blocks of that place,
        and when there are none, that every block is free. Changes nothing.

        Raises:
            AssertionError: naming what is wrong.
        """
        for _ in self.integrity_parts():
            pass

    def integrity_parts(self) -> Iterator[None]:
        """`check_integrity` part by part: the books may change between two, by whole steps."""
        self._check_places()
        yield
        for request in list(self.running):
            if request.status is RequestStatus.RUNNING:  # it may have ended since
                self._check_running(request)
                yield
        yield from self.kv.integrity_parts()

    def _check_places(self) -> None:
        """Check where everybody stands, and who holds anything."""
        waiting, running = list(self.waiting), self.running
        ids = [r.request_id for r in (*waiting, *running, *self.compiling.values())]
        assert len(ids) == len(set(ids)), "a request stands in two places"
        assert set(ids) == set(self.requests), "a request is lost or forgotten"
        assert self.aside.keys().isdisjoint(self.requests), "who is set aside is still there"
        assert len(running) <= self.max_running, "more run than max_num_seqs"
        for request in running:
            assert request.status is RequestStatus.RUNNING, f"{request} is in running"
        for request in self.compiling.values():
            compiles = request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            assert compiles, f"{request} waits for no grammar"
        for request in waiting:
            waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert waits, f"{request} is in the queue"
            assert not self.kv.num_slots_of(request.request_id), f"{request} waits holding blocks"
            progress = request.num_computed_tokens or request.num_quiet_tokens
            assert not progress, f"{request} waits having computed something"
        self.kv.check_holders(
            {r.request_id for r in running},
            {r.request_id for r in (*waiting, *self.aside.values())},
        )
        if not self.requests:
            assert self.kv.usage == 0.0, f"idle, but {self.kv.usage:.1%} of the blocks are held"

    def _check_running(self, request: Request) -> None:
        known = request.num_computed_tokens <= request.num_tokens
        assert known or self.in_flight, f"{request} is ahead, and no drafts are in flight"
        assert request.num_computed_tokens > 0, f"{request} runs and has computed nothing"
        room = self.kv.num_slots_of(request.request_id)
        assert room >= request.num_computed_tokens, f"{request} has KV outside its blocks"
        assert room >= request.num_quiet_tokens, f"{request} would be quiet outside its blocks"
        self.kv.check_blocks_of(request)
