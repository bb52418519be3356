"""What the results of a step mean: tokens appended, drafts judged, requests ended or failed.

The second half of the scheduler, which owns all state. Knows no tensors and no text.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from quire.core.batch import BatchResult, ScheduledBatch
from quire.core.facts import FactKind, Loss
from quire.core.output import EngineCoreOutput, output_of
from quire.core.request import Request, RequestStatus
from quire.core.stop import check_stop
from quire.logger import get_logger

if TYPE_CHECKING:
    from quire.core.scheduler import Scheduler

logger = get_logger(__name__)


def update_from_output(
    scheduler: Scheduler, batch: ScheduledBatch, result: BatchResult
) -> list[EngineCoreOutput]:
    """See `Scheduler.update`."""
    outputs: list[EngineCoreOutput] = []
    distrusted = _fail_requests(scheduler, result, outputs)
    if scheduler.kv.swap is not None:
        distrusted |= _apply_swaps(scheduler, batch, result)
    finished = bool(outputs)
    requests, max_model_len = scheduler.requests, scheduler.max_model_len
    drafts = batch.scheduled_spec_tokens
    for request_id, tokens in result.sampled_token_ids.items():
        request = requests.get(request_id)
        if request is None or request_id in distrusted:
            continue
        everything = request.all_token_ids
        num_tokens = len(everything) + 1
        if (
            len(tokens) == 1
            and request.num_prompt_tokens < num_tokens - 1
            and num_tokens < request.length_limit
            and num_tokens < max_model_len
            and tokens[0] not in request.stop_ids
            and request_id not in result.logprobs
            and not drafts
        ):
            # The common case: one more token, nothing to report but it.
            everything.append(tokens[0])
            outputs.append(EngineCoreOutput(request_id, tokens))
            continue
        if request_id in drafts:
            _judge_drafts(scheduler, request, len(drafts[request_id]), len(tokens) - 1)
        output = _append_tokens(scheduler, request, tokens, result)
        finished |= output.finish_reason is not None
        outputs.append(output)
    for request_id, pooled in result.pooled.items():
        request = requests.get(request_id)
        if request is not None and request_id not in distrusted:
            # A pooling request ends with its prompt.
            request.status = RequestStatus.FINISHED_STOPPED
            outputs.append(output_of(request, [], pooled=pooled))
            scheduler.free_request(request)
            finished = True
    for request_id, guesses in result.draft_token_ids.items():
        if (request := requests.get(request_id)) and request.status is RequestStatus.RUNNING:
            request.spec_token_ids = guesses
    if finished:
        scheduler.drop_finished()
    return outputs


def _judge_drafts(scheduler: Scheduler, request: Request, count: int, accepted: int) -> None:
    """What was computed for rejected drafts does not count."""
    assert 0 <= accepted <= count, f"{accepted} of {count} drafts of {request} accepted"
    request.num_computed_tokens -= count - accepted
    scheduler.facts.add(FactKind.VERIFIED, request.number, a=count, b=accepted)


def _append_tokens(
    scheduler: Scheduler, request: Request, tokens: list[int], result: BatchResult
) -> EngineCoreOutput:
    first = request.num_output_tokens == 0
    kept = 0
    for token in tokens:
        request.all_token_ids.append(token)
        kept += 1
        if check_stop(request, scheduler.max_model_len):
            break
    logprobs = result.logprobs.get(request.request_id)
    prompt_logprobs = result.prompt_logprobs.get(request.request_id) if first else None
    output = output_of(request, tokens[:kept], logprobs and logprobs[:kept], prompt_logprobs)
    if request.status.is_finished:
        # Accepted drafts after the end have KV, but are no tokens of the request.
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
        scheduler.free_request(request)
    return output


def _apply_swaps(scheduler: Scheduler, batch: ScheduledBatch, result: BatchResult) -> set[str]:
    """Learn what copies cost, and have computed again what they lost.

    Returns:
        Ids of requests whose result of this step must not be used.
    """
    scheduler.swap_cost.observe(batch, result)
    swap = scheduler.kv.swap
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
    suspect = scheduler.kv.uncache_ids(result.unread)
    return set(_recompute_readers(scheduler, suspect))


def _fail_requests(
    scheduler: Scheduler, result: BatchResult, outputs: list[EngineCoreOutput]
) -> set[str]:
    """End the requests that failed alone, and compute again what others read from them.

    Returns:
        Ids whose result of this step must not be used.
    """
    if not result.failed:
        return set()
    suspect: set[int] = set()
    for request_id, reason in result.failed.items():
        request = scheduler.requests.get(request_id)
        if request is None:
            continue
        first = max(0, request.num_cached_tokens)
        suspect.update(scheduler.kv.uncache_from(request, first))
        request.status = RequestStatus.FINISHED_ERROR
        request.error = reason
        outputs.append(output_of(request, []))
        scheduler.free_request(request)
    scheduler.drop_finished()
    return {*result.failed, *_recompute_readers(scheduler, suspect)}


def _recompute_readers(scheduler: Scheduler, suspect: set[int]) -> list[str]:
    """Preempt the requests that hold blocks of a failed one: they shared them as a prefix."""
    again: list[str] = []
    for request in reversed(scheduler.running[:]):
        if suspect.isdisjoint(chain(*scheduler.kv.get_block_ids(request.request_id))):
            continue
        scheduler.kv.uncache_from(request, 0)
        scheduler.running.remove(request)
        scheduler.preempt(request, Loss.FAILURE)
        again.append(request.request_id)
    # The worker still holds their state; a resumed request replaces it.
    return again
