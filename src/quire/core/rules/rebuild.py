"""Makes the books anew when they do not agree with themselves, and says what stood in them.

What a request is cannot be lost that way: its tokens. Everything else (who runs, who holds which
block, what the cache holds, the order of the queue) follows from a new start, as after `undo` of
everything: whoever ran is computed again, and no cached content is trusted. Knows no text.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from quire.core.books import Books
from quire.core.facts import FactKind, Loss
from quire.core.request import Request, RequestStatus
from quire.core.rules.undo import requeue


def rebuild(books: Books) -> None:
    """Bring all requests that have not ended back to the queue, holding nothing, and empty pool,
    cache and second tier. The worker must forget all requests."""
    books.in_flight.clear()
    books.landed = books.doubt = None
    alive = _alive(books)
    ran = [r for r in alive if r.status is RequestStatus.RUNNING]
    books.facts.at(books.clock.now())
    for request in alive:
        request.forget_progress()
    for request in ran:
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        books.facts.add(FactKind.PREEMPTED, request.number, Loss.UNDONE, a=request.num_tokens)
    books.kv.forget_all()
    books.requests = {r.request_id: r for r in alive}
    books.aside, books.running, books.finished_req_ids = {}, [], []
    requeue(books, ran)


def describe(books: Books) -> dict[str, Any]:
    """What stands in the books, for a log: ids, numbers and blocks, and no token of anybody."""
    return {
        "step": books.step,
        "requests": [
            {
                "id": r.request_id,
                "status": r.status.name,
                "tokens": r.num_tokens,
                "computed": r.num_computed_tokens,
                "preemptions": r.num_preemptions,
                "blocks": books.kv.get_block_ids(r.request_id),
            }
            for r in _alive(books)
        ],
        "known": list(books.requests),
        "running": [r.request_id for r in books.running],
        "waiting": [r.request_id for r in books.waiting],
        "compiling": list(books.compiling),
        "in_flight": len(books.in_flight),
        "free_blocks": books.kv.block_pool.get_num_free_blocks(),
        "referenced_blocks": {
            b.block_id: b.ref_cnt for b in books.kv.block_pool.blocks if b.ref_cnt
        },
    }


def _alive(books: Books) -> list[Request]:
    """Whoever stands anywhere, in order of arrival: a request lost from one place is in another."""
    places = (
        books.requests.values(), books.running, books.waiting, books.compiling.values(),
        books.aside.values(),
    )  # fmt: skip
    found = {r.request_id: r for r in chain(*places) if not r.status.is_finished}
    return sorted(found.values(), key=lambda request: request.number)
