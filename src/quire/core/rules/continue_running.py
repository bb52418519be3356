"""Running requests get their next tokens: decodes, unfinished prompts and drafts, oldest first.

Whoever finds no block for its next token has others preempted, until there is room or it is its
own turn to give way.
"""

from __future__ import annotations

from itertools import islice

from quire.core.batch import BlockIds
from quire.core.books import Books
from quire.core.facts import FactKind, Loss, Wait
from quire.core.plan import StepPlan
from quire.core.request import Request
from quire.core.rules.preempt import evict


def continue_running(books: Books, plan: StepPlan) -> None:
    """Give each running request its next tokens, within the budget; preempt to find room."""
    running = books.running
    # Requests admitted this step are last in the list and already have their tokens.
    index, end = 0, len(running) - len(plan.admitted)
    while index < end and plan.budget > 0:
        index += plan.take_decodes(islice(running, index, end))
        if index < end and plan.budget > 0:
            request = running[index]
            if not _continue(books, request, plan):
                end = len(running) - len(plan.admitted)
                break  # it has left its place to others, which found no room either
            # Taking a victim from before this request has moved everything up.
            index = (running.index(request) if plan.preempted else index) + 1
            end = len(running) - len(plan.admitted)
    if index < end:
        why = Wait.BUDGET if plan.budget <= 0 else Wait.BLOCKS
        count = end - index
        if books.in_flight:
            # Some of these may have ended by the time the records leave: name each.
            for request in running[index:end]:
                computed = request.num_computed_tokens
                books.facts.add(FactKind.CHUNK, request.number, a=0, b=computed)
            count = 0
        books.facts.add(FactKind.STALLED, 0, why, a=count)


def _continue(books: Books, request: Request, plan: StepPlan) -> bool:
    """Give one running request its next tokens, whatever they are.

    Returns:
        Whether it still runs: it may have been the one that had to give way.
    """
    computed = request.num_computed_tokens
    wanted = request.num_tokens_with_spec - computed
    num_new = min(wanted, plan.chunk_limit, plan.budget)
    if request.spec_token_ids:
        num_new = _take_drafts(request, num_new, plan)
    if num_new != 1 or computed < request.num_prompt_tokens:
        drafts = len(plan.drafts.get(request.request_id, ()))
        books.facts.add(FactKind.CHUNK, request.number, a=max(0, num_new), b=computed, c=drafts)
    if num_new <= 0:
        return True  # all that is known of it, and perhaps drafts, are in flight
    new_blocks: BlockIds = ()
    if computed + num_new > request.num_quiet_tokens:
        blocks = _find_room(books, request, num_new, plan)
        if blocks is None:
            return False
        new_blocks = blocks
    plan.cached_ids.append(request.request_id)
    plan.new_blocks.append(new_blocks)
    plan.computed.append(computed)
    plan.take(request, num_new)
    return True


def _take_drafts(request: Request, num_new: int, plan: StepPlan) -> int:
    """Have a request's drafts verified, as many as fit and could still become output.

    Returns:
        Tokens of the request in this step, drafts included.
    """
    drafts, request.spec_token_ids = list(request.spec_token_ids), ()
    num_tokens = request.num_tokens
    known = min(num_new, num_tokens - request.num_computed_tokens)
    # Even if every draft is rejected the step gives one token, so that one needs no draft.
    useful = request.length_limit - num_tokens - 1
    drafts = drafts[: max(0, min(num_new - known, useful))]
    if drafts:
        plan.drafts[request.request_id] = drafts
    return known + len(drafts)


def _find_room(books: Books, request: Request, num_new: int, plan: StepPlan) -> BlockIds | None:
    """Allocate for a running request, preempting others as long as it takes.

    Returns:
        The new blocks, or None if the request itself was the one to give way.
    """
    kv, lookahead = books.kv, books.num_lookahead_tokens
    while True:
        blocks = kv.allocate_slots(request, num_new, num_lookahead_tokens=lookahead)
        if blocks is not None:
            request.limit_quiet_tokens(request.num_computed_tokens + num_new)
            return blocks
        victim = books.waiting.choose_victim(books.running)
        evict(books, victim, plan, Loss.BLOCKS, request)
        if victim is request:
            return None
