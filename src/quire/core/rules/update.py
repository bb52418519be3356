"""What the results of a step mean: tokens appended, drafts judged, requests ended or failed.

Called once a step has run. Knows no tensors and no text.
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
            # The common case: one more token, nothing to report but it.
            everything.append(tokens[0])
            outputs.append(EngineCoreOutput(request_id, tokens))
            continue
        if request_id in distrusted:
            continue
        if request_id in drafts:
            _judge_drafts(books, request, len(drafts[request_id]), len(tokens) - 1)
        output = _append_tokens(books, request, tokens, result)
        finished |= output.finish_reason is not None
        outputs.append(output)
    for request_id, pooled in result.pooled.items():
        request = requests.get(request_id)
        if request is not None and request_id not in distrusted:
            # A pooling request ends with its prompt.
            request.status = RequestStatus.FINISHED_STOPPED
            outputs.append(output_of(request, [], pooled=pooled))
            books.end(request)
            finished = True
    for request_id, guesses in result.draft_token_ids.items():
        if (request := requests.get(request_id)) and request.status is RequestStatus.RUNNING:
            request.spec_token_ids = guesses
    if finished:
        books.drop_finished()
    return outputs


def _judge_drafts(books: Books, request: Request, count: int, accepted: int) -> None:
    """What was computed for rejected drafts does not count."""
    assert 0 <= accepted <= count, f"{accepted} of {count} drafts of {request} accepted"
    request.num_computed_tokens -= count - accepted
    books.facts.add(FactKind.VERIFIED, request.number, a=count, b=accepted)


def _append_tokens(
    books: Books, request: Request, tokens: list[int], result: BatchResult
) -> EngineCoreOutput:
    first = request.num_output_tokens == 0
    kept = 0
    for token in tokens:
        request.all_token_ids.append(token)
        kept += 1
        if check_stop(request):
            break
    logprobs = result.logprobs.get(request.request_id)
    prompt_logprobs = result.prompt_logprobs.get(request.request_id) if first else None
    output = output_of(request, tokens[:kept], logprobs and logprobs[:kept], prompt_logprobs)
    if request.status.is_finished:
        books.end(request)
    return output


def _apply_swaps(books: Books, batch: ScheduledBatch, result: BatchResult) -> set[str]:
    """Learn what copies cost, and have computed again what they lost.

    Returns:
        Ids of requests whose result of this step must not be used.
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
    swap.num_failures += len(result.unread)
    suspect = books.kv.uncache_ids(result.unread)
    return set(_recompute_readers(books, suspect))


def _fail_requests(books: Books, result: BatchResult, outputs: list[EngineCoreOutput]) -> set[str]:
    """End the requests that failed alone, and compute again what others read from them.

    Returns:
        Ids whose result of this step must not be used.
    """
    if not result.failed:
        return set()
    suspect: set[int] = set()
    for request_id, reason in result.failed.items():
        request = books.requests.get(request_id)
        if request is None:
            continue
        suspect.update(books.kv.uncache_from(request, request.num_found_tokens))
        request.status = RequestStatus.FINISHED_ERROR
        request.error = reason
        outputs.append(output_of(request, []))
        books.end(request)
    books.drop_finished()
    return {*result.failed, *_recompute_readers(books, suspect)}


def _recompute_readers(books: Books, suspect: set[int]) -> list[str]:
    """Preempt the requests that hold blocks of a failed one: they shared them as a prefix."""
    again: list[str] = []
    for request in reversed(books.running[:]):
        if suspect.isdisjoint(chain(*books.kv.get_block_ids(request.request_id))):
            continue
        books.kv.uncache_from(request, 0)
        books.running.remove(request)
        preempt(books, request, Loss.FAILURE)
        again.append(request.request_id)
    # The worker still holds their state; a resumed request replaces it.
    return again
