"""Batches in flight: put there when they are scheduled, taken out when their result is applied, or
all taken back at once.

Only for executors that take several batches; with one at a time nothing here is called.
"""

from __future__ import annotations

from quire.core.batch import BatchResult, ScheduledBatch
from quire.core.books import Books
from quire.core.change import Change
from quire.core.flight import Flight
from quire.core.rules.undo import undo


def launch(books: Books, batch: ScheduledBatch) -> None:
    """A batch is put together and will be submitted."""
    change = books.change
    books.in_flight.append(
        Flight(
            batch.step,
            books.facts.started,
            books.kv.block_pool.step - 1,
            {} if change is None else change.swapped,
            books.facts.take(),
        )
    )


def land(books: Books, batch: ScheduledBatch, result: BatchResult) -> None:
    """The result of the oldest batch in flight is there: leave in it what still counts.

    If a request failed in it, or copies of the second tier did, later batches may have read what
    was never written, and a request that was to write it may hold it no longer: by what is held
    now nobody can tell. Then nothing of the result counts but the failures, and the books are in
    doubt: see `take_back`.
    """
    flight = books.in_flight.popleft()
    assert flight.step == batch.step, f"the result of step {batch.step} before {flight.step}"
    books.landed = flight
    books.facts.resume(flight.step, flight.started)
    by_request = (
        result.sampled_token_ids, result.logprobs, result.prompt_logprobs, result.scored,
        result.pooled, result.draft_token_ids,
    )  # fmt: skip
    has_failure = bool(result.failed or result.unwritten or result.unread)
    if has_failure and (books.in_flight or flight.dropped):
        # A request that was dropped counts, too: it has left blocks behind.
        books.doubt = flight
        for part in by_request:
            part.clear()
    for request_id in flight.dropped:
        result.failed.pop(request_id, None)
        for part in by_request:
            part.pop(request_id, None)


def take_back(books: Books) -> None:
    """Take back the batches that were scheduled on top of one with a failure, and that one: what
    they computed may be wrong. Tokens that were output before stand; the worker must forget all
    requests."""
    flight, swap = books.doubt, books.kv.swap
    assert flight is not None, "nothing is in doubt"
    undo(
        books,
        Change(
            books.running,
            facts=books.facts.mark(),
            pool_counts=books.pool_counts,
            pool_step=flight.pool_step,
            swapped={} if swap is None else swap.still_kept(flight.swapped),
            in_flight=tuple(books.in_flight),
        ),
    )
