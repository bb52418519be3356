"""One step of any model: what the runners for text and for pooling have in common.

These are the batch state, copies of KV blocks, a forward pass, and a head that uses the hidden
states. Does not know how tokens are sampled or states are pooled, and knows no model family.

Failures are contained. If a step raises, it is run again in halves, until the request that makes it
raise is alone. That request fails, and the others get the same results as without it, because a row
does not depend on its neighbours, and writing the same keys and values twice changes nothing. State
advances only after a pass has succeeded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.core.batch import BatchResult, ScheduledBatch, TokenLogprobs
from quire.errors import NOT_A_NUMBER, GrammarFailed, ProcessorFailed
from quire.kernels.scopes import follow, scope
from quire.logger import get_logger
from quire.outputs import Pooled
from quire.utils.signals import pass_on_signals
from quire.worker.cache_blocks import CacheBlocks
from quire.worker.device import Device
from quire.worker.forward_pass import ForwardPass
from quire.worker.input_batch import InputBatch, StepInputs

logger = get_logger(__name__)


@dataclass(slots=True)
class Outcome:
    """The results of one pass, before any of them becomes state."""

    sampled: dict[str, list[int]] = field(default_factory=dict)
    """The accepted drafts of each request, and one more token."""
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Parallel to `sampled`, for the requests that asked."""
    prompt_entries: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Of the prompt tokens after the positions of this pass, for the requests that asked."""
    scored: dict[str, tuple[int, np.ndarray]] = field(default_factory=dict)
    """Rows of `prompt_logprob_token_ids` that follow positions of this pass: which is the first,
    and their log-probabilities."""
    failed: dict[str, str] = field(default_factory=dict)
    """Requests that failed alone, with the reason."""
    pooled: dict[str, Pooled] = field(default_factory=dict)
    """Of requests whose prompt ended in this pass."""

    def merge(self, other: Outcome) -> Outcome:
        """Add another pass's results."""
        for name in self.__dataclass_fields__:
            getattr(self, name).update(getattr(other, name))
        return self


class StepHead(Protocol):
    """The part of a runner that uses the hidden states."""

    def wants_every_token(self) -> bool:
        """Whether the states of all tokens are needed, not only of those that end a request's
        known tokens."""
        ...

    def read_every_token(self, inputs: StepInputs, hidden: Tensor, outcome: Outcome) -> Tensor:
        """Use the states of all tokens `[T, H]`, if they are wanted; returns what `finish` gets."""
        ...

    def finish(self, inputs: StepInputs, hidden: Tensor, outcome: Outcome) -> None:
        """Add the results of the requests that get some in this pass to `outcome`.

        May be called again for the same requests if a later one of the pass raises, so it must not
        change state that a second call would read.
        """
        ...

    def commit(self, outcome: Outcome, result: BatchResult) -> None:
        """Advance the head's state, and convert the results into the scheduler's records."""
        ...


@dataclass(frozen=True, slots=True)
class WholePass:
    """What a shortcut has computed."""

    outcome: Outcome
    forward_seconds: float
    finish_seconds: float


class Shortcut(Protocol):
    """Computes some passes as a whole. Nothing of torch is needed around it: the first use of each
    part of torch takes 30 to 60 us in a step whose weights have emptied the caches."""

    def __call__(self, req_ids: Sequence[str], counts: Sequence[int]) -> WholePass | None:
        """The results of a pass; `None`: not of this one, and all that was done is done again."""
        ...


class StepRunner:
    """Runs batches: state, KV blocks, forward pass and head, with failures contained.

    Args:
        forward: Computes hidden states.
        head: Turns them into results.
        input_batch: Empty state of the right size.
        blocks: Of the KV cache.
        device: Where all of that is.
        shortcut: The same results of some passes in less time, if there is one.
    """

    def __init__(
        self,
        forward: ForwardPass,
        head: StepHead,
        input_batch: InputBatch,
        blocks: CacheBlocks,
        device: Device,
        shortcut: Shortcut | None = None,
    ) -> None:
        self._forward = forward
        self._head = head
        self._input_batch = input_batch
        self._blocks = blocks
        self._device = device
        self._shortcut = shortcut
        self._forward_seconds = self._finish_seconds = 0.0

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        """Compute a batch and return the results of each request."""
        self._forward_seconds = self._finish_seconds = 0.0
        follow()
        failed = self._update_states(batch)
        moved = self._blocks.prepare(batch)
        scheduled = batch.num_scheduled_tokens
        if failed:
            scheduled = {i: n for i, n in scheduled.items() if i not in failed}
        outcome = Outcome()
        if scheduled:
            outcome = self._attempt(list(scheduled), list(scheduled.values()))
        outcome.failed.update(failed)
        result = BatchResult(
            sampled_token_ids=outcome.sampled,
            failed=outcome.failed,
            forward_seconds=self._forward_seconds,
            sample_seconds=self._finish_seconds,
            unwritten=moved.unwritten,
            unread=moved.unread,
            swap_seconds=moved.seconds,
        )
        self._head.commit(outcome, result)
        return result

    def reset(self) -> None:
        """Forget all requests."""
        self._input_batch.clear()
        self._blocks.forget()

    def release_blocks(self, block_ids: Sequence[int]) -> int:
        """Give the pages of blocks, in ascending order, back to the machine; gives their bytes."""
        return self._blocks.release(block_ids)

    def _update_states(self, batch: ScheduledBatch) -> dict[str, str]:
        """Apply the batch's changes to the requests; returns those that cannot be added."""
        failed: dict[str, str] = {}
        for req_id in (*batch.finished_req_ids, *batch.preempted_req_ids):
            self._input_batch.remove(req_id)
        for new in batch.scheduled_new_reqs:
            try:
                self._input_batch.add(new)
                self._blocks.note_fresh(new.block_ids, new.num_computed_tokens)
            except Exception as error:
                pass_on_signals(error)
                failed[new.req_id] = _reason(new.req_id, error)
                self._input_batch.remove(new.req_id)
        cached = batch.scheduled_cached_reqs
        for req_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            self._input_batch.advance(req_id, computed, blocks)
            if blocks:
                self._blocks.note_fresh(blocks, 0)
        for req_id, drafts in batch.scheduled_spec_tokens.items():
            self._input_batch.put_drafts(req_id, drafts)
        return failed

    def _attempt(self, req_ids: Sequence[str], counts: Sequence[int]) -> Outcome:
        """Run requests together; if that raises, in halves, down to the request that causes it."""
        try:
            return self._run(req_ids, counts)
        except Exception as error:
            pass_on_signals(error)
            if len(req_ids) == 1:
                without = self._input_batch.num_known(req_ids[0], counts[0])
                if without < counts[0]:
                    # Whatever drafts do, they must not fail a request that works without them.
                    logger.warning("request %s raised with drafts: trying without", req_ids[0])
                    return self._attempt(req_ids, [without])
                return Outcome(failed={req_ids[0]: _reason(req_ids[0], error)})
            logger.warning(
                "a step of %d requests raised %s; trying halves to find the one that does it",
                len(req_ids),
                type(error).__name__,
            )
        # In order: a later request may read blocks that an earlier one fills in this very step.
        half = len(req_ids) // 2
        first = self._attempt(req_ids[:half], counts[:half])
        return first.merge(self._attempt(req_ids[half:], counts[half:]))

    def _run(self, req_ids: Sequence[str], counts: Sequence[int]) -> Outcome:
        if self._shortcut is not None:
            taken = self._shortcut(req_ids, counts)
            if taken is not None:
                self._forward_seconds += taken.forward_seconds
                self._finish_seconds += taken.finish_seconds
                return taken.outcome
        return self._run_parts(req_ids, counts)

    @torch.inference_mode()
    def _run_parts(self, req_ids: Sequence[str], counts: Sequence[int]) -> Outcome:
        """Inputs, forward pass and head, one after the other."""
        inputs = self._input_batch.select(req_ids, counts)
        every_token = self._head.wants_every_token()
        start = time.perf_counter()
        hidden = self._forward(inputs, every_token)
        self._device.synchronize()
        self._forward_seconds += time.perf_counter() - start
        outcome = Outcome()
        if len(inputs.chunks):
            self._check_chunks(inputs, hidden, every_token, outcome)
            if inputs.sampled is not None and not every_token:
                hidden = hidden[torch.from_numpy(inputs.sampled).to(hidden.device)]
        if every_token:
            hidden = self._head.read_every_token(inputs, hidden, outcome)
        start = time.perf_counter()
        with scope("quire: sample"):
            self._head.finish(inputs, hidden, outcome)
        self._finish_seconds += time.perf_counter() - start
        return outcome

    def _check_chunks(
        self, inputs: StepInputs, hidden: Tensor, every_token: bool, outcome: Outcome
    ) -> None:
        """Fail requests of whose chunk something is not finite. Chunks give no logits in which that
        would show, but their KV can be found in the prefix cache from now on. The last token of a
        chunk has attended to all of it, so its state tells."""
        starts = inputs.query_start_loc if every_token else inputs.wanted_start_loc
        states = hidden[torch.from_numpy(starts[inputs.chunks + 1] - 1).to(hidden.device)]
        finite = torch.isfinite(states).all(1).tolist()
        for index, fine in zip(inputs.chunks.tolist(), finite, strict=True):
            if not fine:
                logger.error("request %s failed: %s", inputs.req_ids[index], NOT_A_NUMBER)
                outcome.failed[inputs.req_ids[index]] = NOT_A_NUMBER


def _reason(req_id: str, error: Exception) -> str:
    """The reason that the caller sees; the exception itself goes only to the log."""
    if isinstance(error, (GrammarFailed, ProcessorFailed)):
        logger.warning("request %s: %s", req_id, error.message)
        return error.message
    logger.error("request %s failed alone in a step", req_id, exc_info=error)
    return f"internal error in the model step ({type(error).__name__}); see the server's log"
