"""What the results of a step mean: tokens are appended, drafts judged, requests ended or failed.

Runs once per step, after the worker. Knows no tensors and no text.
"""

from __future__ import annotations

from itertools import chain

from quire.core.batch import BatchResult, ScheduledBatch
from quire.core.books import Books
from quire.core.facts import FactKind, Loss
from quire.core.output import EngineCoreOutput, output_of
from quire.core.request import Request, RequestStatus
from quire.core.rules.preempt import preempt
from quire.core.stop import check_stop
from quire.logger import get_logger

logger = get_logger(__name__)


def update_from_output(
    books: Books, batch: ScheduledBatch, result: BatchResult
) -> list[EngineCoreOutput]:
    """See `Scheduler.update`."""
    # First find out whose result must not be used: a request that failed, and the requests that
    # read blocks which were never written.
    outputs: list[EngineCoreOutput] = []
    distrusted = _fail_requests(books, result, outputs)
    if books.kv.swap is not None:
        distrusted |= _apply_swaps(books, batch, result)
    finished = bool(outputs)
    requests, drafts = books.requests, batch.scheduled_spec_tokens
    watched = distrusted | result.logprobs.keys()
    plain, none_watched = not drafts, not watched
    for request_id, tokens in result.sampled_token_ids.items():
        request = requests.get(request_id)
        if request is None:
            continue
        everything = request.all_token_ids
        if (
            plain
            and len(everything) <= request.num_quiet_tokens
            and len(tokens) == 1
            and tokens[0] not in request.stop_ids
            and (none_watched or request_id not in watched)
        ):
            # A quiet decode: the token is all there is to append, to check and to tell.
            everything.append(tokens[0])
            outputs.append(EngineCoreOutput(request_id, tokens))
            continue
        if request_id in distrusted:
            continue
        if request_id in drafts:
            accepted = len(tokens) - 1 - result.num_forced.get(request_id, 0)
            _judge_drafts(books, request, len(drafts[request_id]), accepted)
        output = _append_tokens(books, request, tokens, result)
        finished |= output.finish_reason is not None
        outputs.append(output)
    finished |= _end_pooled(books, result, distrusted, outputs)
    for request_id, guesses in result.draft_token_ids.items():
        if (request := requests.get(request_id)) and request.status is RequestStatus.RUNNING:
            request.spec_token_ids = guesses
    if finished:
        books.drop_finished()
    return outputs


def _end_pooled(
    books: Books, result: BatchResult, distrusted: set[str], outputs: list[EngineCoreOutput]
) -> bool:
    """End the pooling requests whose prompt is computed; gives whether there are any."""
    any_ended = False
    for request_id, pooled in result.pooled.items():
        request = books.requests.get(request_id)
        if request is not None and request_id not in distrusted:
            request.status = RequestStatus.FINISHED_STOPPED
            outputs.append(output_of(request, [], pooled=pooled))
            books.end(request)
            any_ended = True
    return any_ended


def _judge_drafts(books: Books, request: Request, count: int, accepted: int) -> None:
    """Take back what was computed for the drafts that were rejected: the next tokens overwrite its
    KV."""
    assert 0 <= accepted <= count, f"{accepted} of {count} drafts of {request} accepted"
    request.num_computed_tokens -= count - accepted
    books.facts.add(FactKind.VERIFIED, request.number, a=count, b=accepted)


def _append_tokens(
    books: Books, request: Request, tokens: list[int], result: BatchResult
) -> EngineCoreOutput:
    """Append sampled tokens up to the one that ends the request, if any does."""
    first = request.num_output_tokens == 0
    kept = 0
    for token in tokens:
        request.all_token_ids.append(token)
        kept += 1
        if check_stop(request):
            break
    logprobs = result.logprobs.get(request.request_id)
    prompt_logprobs = result.prompt_logprobs.get(request.request_id) if first else None
    scored = result.scored.get(request.request_id) if first else None
    logprobs = logprobs and logprobs[:kept]
    output = output_of(request, tokens[:kept], logprobs, prompt_logprobs, scored=scored)
    if request.status.is_finished:
        books.end(request)
    return output


def _apply_swaps(books: Books, batch: ScheduledBatch, result: BatchResult) -> set[str]:
    """Learn what the copies of this step cost. Where one failed, preempt the requests that lost
    KV by it, so that they compute it again.

    Returns:
        Ids of the requests whose result of this step must not be used.
    """
    books.swap_cost.observe(batch, result)
    swap = books.kv.swap
    assert swap is not None, "moves were made"
    if result.unwritten:
        if not swap.is_closed:
            logger.warning(
                "the second KV tier cannot be written; from now on preempted requests are "
                "recomputed, and %d blocks are lost: see the worker's log for the cause",
                len(result.unwritten),
            )
        swap.lose(result.unwritten)
    if not result.unread:
        return set()
    # What could not be read once must not be found there again: the requests that are about to
    # compute it again would read it once more.
    unread = set(result.unread)
    swap.forget_blocks([src for src, dst in batch.swap_in if dst in unread])
    suspect = books.kv.uncache_ids(result.unread)
    return set(_recompute_readers(books, suspect))


def _fail_requests(books: Books, result: BatchResult, outputs: list[EngineCoreOutput]) -> set[str]:
    """End the requests that the worker reports as failed, and preempt those that share their
    blocks.

    Returns:
        Ids of the requests whose result of this step must not be used.
    """
    if not result.failed:
        return set()
    suspect: set[int] = set()
    for request_id, reason in result.failed.items():
        request = books.requests.get(request_id)
        if request is None:
            continue
        # What it found in the prefix cache was computed by others, before it failed.
        suspect.update(books.kv.uncache_from(request, request.num_found_tokens))
        request.status = RequestStatus.FINISHED_ERROR
        request.error = reason
        outputs.append(output_of(request, []))
        books.end(request)
    books.drop_finished()
    return {*result.failed, *_recompute_readers(books, suspect)}


def _recompute_readers(books: Books, suspect: set[int]) -> list[str]:
    """Preempt the requests that hold suspect blocks: they share them as a prefix.

    The worker still has their state. It is replaced when they come back, because a request that
    returns travels in full.
    """
    again: list[str] = []
    # Last admitted first: each goes to the front of the queue, so that they keep their order.
    for request in reversed(books.running[:]):
        if suspect.isdisjoint(chain(*books.kv.get_block_ids(request.request_id))):
            continue
        books.kv.uncache_from(request, 0)
        books.running.remove(request)
        preempt(books, request, Loss.FAILURE)
        again.append(request.request_id)
    return again
