"""Takes back a change of the books that was left by an exception, as if it had not happened.

A step can be left at any statement: by a Ctrl-C or an alarm in the caller's process, by a bug, or
because memory ran out. Undoing it statement by statement would take a log of every assignment.
Instead the books are rebuilt from what cannot be half done: the tokens of each request, cut back
to their number before the change, and the blocks whose content was computed in earlier steps.
Every request that ran waits to come back, as after a preemption, and finds most of its own KV in
the prefix cache. The worker must forget all requests, too.

If undoing is interrupted as well, it can be done again. It knows no tensors and no text.
"""

from __future__ import annotations

from quire.core.books import Books
from quire.core.change import Change
from quire.core.facts import FactKind, Loss
from quire.core.policy_loader import make_policy
from quire.core.request import Request, RequestStatus


def undo(books: Books, change: Change) -> None:
    """Bring the books back to before a change; see the top of this module."""
    books.facts.restore(change.facts)
    for flight in reversed(change.in_flight):
        books.facts.put_back(flight.records, flight.names)
    books.in_flight.clear()
    books.landed = books.doubt = None
    books.pool_counts = change.pool_counts
    requests = _known_before(books, change)
    for request, num_tokens in zip(change.ran, change.num_tokens, strict=True):
        _stop_running(request, num_tokens)
    for request, status, num_tokens in change.admitted:
        _leave_waiting(request, status, num_tokens)
    # Whoever asked for these to end may not ask again.
    ended = [requests.pop(request_id) for request_id in change.ended if request_id in requests]
    swapped = {i: place for i, place in change.swapped.items() if i in requests}
    if books.kv.swap is not None and books.max_in_flight > 1:
        # A batch may have brought one back and the next one written over where it was.
        swapped = books.kv.swap.still_kept(swapped)
    books.kv.undo(change.pool_step, swapped)
    for request in requests.values():
        request.forget_progress()
    returning = [request for request in change.ran if request.request_id in requests]
    _tell(books, change, returning, ended)
    books.requests, books.running, books.finished_req_ids = requests, [], []
    requeue(books, returning)


def _known_before(books: Books, change: Change) -> dict[str, Request]:
    """All requests of before the change, by id, in order of arrival."""
    # A request that the step has ended is no longer in `requests`, but it had run or come in.
    known = set(books.requests.values())
    known.update(change.ran)
    known.update(request for request, _, _ in change.admitted)
    known.difference_update(change.added)
    return {r.request_id: r for r in sorted(known, key=lambda r: r.number)}


def _stop_running(request: Request, num_tokens: int) -> None:
    """A request that ran becomes a preempted one, unless the change itself had preempted it."""
    _cut(request, num_tokens)
    if request.status is not RequestStatus.PREEMPTED:
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED


def _leave_waiting(request: Request, status: RequestStatus, num_tokens: int) -> None:
    """A request that was admitted waits again, as before."""
    _cut(request, num_tokens)
    request.status = status
    if status is RequestStatus.WAITING:
        request.num_cached_tokens, request.num_promoted_tokens = -1, 0
        request.scheduled_ts = 0.0


def _cut(request: Request, num_tokens: int) -> None:
    del request.all_token_ids[num_tokens:]
    request.stop_reason = request.error = None


def _tell(books: Books, change: Change, returning: list[Request], ended: list[Request]) -> None:
    """Record which requests lost their place, and which ended."""
    facts = books.facts
    facts.at(books.clock.now())
    for request in returning:
        facts.add(FactKind.PREEMPTED, request.number, Loss.UNDONE, a=request.num_tokens)
    for request in ended:
        request.status = change.ended[request.request_id]
        facts.add(FactKind.FINISHED, request.number, request.status, a=request.num_output_tokens)


def requeue(books: Books, returning: list[Request]) -> None:
    """Rebuild the queue from `books.requests`, none of which may run: those that ran come first, in
    their old order, then those that had been preempted earlier, then the new ones in the order of
    the policy."""
    policy = make_policy(books.config, books.count_uncached)
    books.restart_delay()
    back = {r.request_id: r for r in returning}
    books.compiling = {}
    for request in books.requests.values():
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            books.compiling[request.request_id] = request
        elif request.status is RequestStatus.WAITING:
            policy.add_request(request)
            books.delay(request)
        else:
            back.setdefault(request.request_id, request)
    for request in reversed(back.values()):
        policy.prepend_request(request)
    books.waiting = policy
