"""The books' own check: queues, statuses and blocks must agree. Changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request, RequestStatus


def check_books(
    requests: Collection[str],
    waiting: Iterable[Request],
    running: Collection[Request],
    max_running: int,
    kv: KVCacheManager,
) -> None:
    """Check that every request stands in one place with the status and blocks of that place, and
    when there are none, that every block is free.

    Raises:
        AssertionError: naming what is wrong.
    """
    waiting = list(waiting)
    ids = [r.request_id for r in (*waiting, *running)]
    assert len(ids) == len(set(ids)), "a request stands in two places"
    assert set(ids) == set(requests), "a request is lost or forgotten"
    assert len(running) <= max_running, "more run than max_num_seqs"
    for request in running:
        assert request.status is RequestStatus.RUNNING, f"{request} is in running"
        assert request.num_computed_tokens <= request.num_tokens, f"{request} is ahead"
        held = kv.num_slots_of(request.request_id)
        assert held >= request.num_computed_tokens, f"{request} has KV outside its blocks"
    for request in waiting:
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{request}"
        assert not kv.num_slots_of(request.request_id), f"{request} waits holding blocks"
    kv.check_integrity()
    if not requests:
        assert kv.usage == 0.0, f"idle, but {kv.usage:.1%} of the blocks are held"
