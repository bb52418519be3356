"""How a running request loses its place: its blocks are swapped out or freed, its output tokens are
kept, and it waits to come back."""

from __future__ import annotations

from quire.core.books import Books
from quire.core.facts import FactKind, Loss
from quire.core.plan import StepPlan
from quire.core.request import Request, RequestStatus


def evict(books: Books, victim: Request, plan: StepPlan, why: Loss, winner: Request) -> None:
    """Take a running request's place and blocks, and what it was given in this step.

    Args:
        books: The books.
        victim: Runs; not admitted in this step.
        plan: The step.
        why: For the records.
        winner: The request that needs the room.
    """
    if victim is books.running[-1]:
        books.running.pop()  # mostly it is the last, and a search would walk over all
    else:
        books.running.remove(victim)
    if plan.give_back(victim):
        # Blocks that this step would have filled were registered when they were allocated, so
        # that others can share them. Now nobody will compute them.
        books.kv.uncache_from(victim, victim.num_computed_tokens)
    preempt(books, victim, why, winner)
    plan.preempted.append(victim.request_id)


def preempt(books: Books, request: Request, why: Loss, winner: Request | None = None) -> None:
    """Put a request that has left `running` back into the queue, swapped out or to be computed
    again."""
    if books.in_flight:
        # Its next token may be in flight. That does not count any more, and to compute it again
        # the last known token is needed.
        books.drop_from_flights(request)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
    # What is left behind by a failure cannot be trusted, so none of it is kept or found again.
    trusted = why is not Loss.FAILURE
    swapped = trusted and _swap_out(books, request)
    books.facts.add(
        FactKind.PREEMPTED,
        request.number,
        why,
        winner.number if winner else 0,
        a=request.num_computed_tokens,
        b=books.kv.num_blocks_of(request.request_id),
        c=int(swapped),
    )
    books.kv.free(request, keep_tail=trusted)
    request.status = RequestStatus.PREEMPTED
    request.num_computed_tokens = 0
    request.spec_token_ids = ()
    request.num_preemptions += 1
    books.waiting.prepend_request(request)


def _swap_out(books: Books, request: Request) -> bool:
    """Keep what a request has computed in the second tier, if that is there and cheaper."""
    swap, params = books.kv.swap, request.sampling_params
    if swap is None:
        return False
    scored = params.prompt_logprobs is not None or params.first_scored is not None
    if (scored and not request.num_output_tokens) or request.pooling_params is not None:
        # What the worker has gathered of the prompt (its log-probabilities, or states to pool)
        # is in no KV block and is lost with its place. It has to compute the prompt again.
        return False
    num_blocks = books.kv.num_blocks_of(request.request_id)
    if not books.swap_cost.prefers_swap(request.num_computed_tokens, num_blocks):
        return False
    return swap.swap_out(request)
