"""Sets requests aside, so that steps run without them while somebody looks for the one that makes
steps fail.

A request that is set aside keeps its tokens and holds no blocks, as one that was preempted. Its
results are the same when it comes back, because they do not depend on what else is in a batch.
"""

from __future__ import annotations

from collections.abc import Container

from quire.core.books import Books
from quire.core.rules.undo import requeue


def set_aside(books: Books, keep: Container[str]) -> None:
    """Schedule only requests whose id is in `keep`, until `bring_back`. Nothing may run or be in
    flight: undo the last change first."""
    assert not books.running and not books.in_flight, "undone before"
    everybody = {**books.requests, **books.aside}
    ordered = sorted(everybody.values(), key=lambda request: request.number)
    books.requests = {r.request_id: r for r in ordered if r.request_id in keep}
    books.aside = {r.request_id: r for r in ordered if r.request_id not in keep}
    requeue(books, [])


def bring_back(books: Books) -> None:
    """All requests that were set aside wait again. Nothing may run or be in flight."""
    set_aside(books, books.requests.keys() | books.aside.keys())
