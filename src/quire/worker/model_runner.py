"""From a scheduled batch to a result: state, tensors, forward, sampling. Family-free.

Failures are contained. A step that raises is run again in halves, down to the request that makes
it raise; that one fails, and the others get the tokens they would have got anyway, because a row
does not depend on its neighbours and writing the same keys and values twice changes nothing.
State moves on only after a pass has succeeded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from quire import envs
from quire.attention.base import KVCache
from quire.core.batch import BatchResult, BlockIds, ScheduledBatch, TokenLogprobs
from quire.errors import NOT_A_NUMBER
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.scopes import follow, scope
from quire.logger import get_logger
from quire.models.base import CausalLM
from quire.outputs import Pooled
from quire.sampling import (
    LogprobRow,
    RequestSampling,
    Sampler,
    SamplerOutput,
    SamplingMetadata,
    gather_logprobs,
)
from quire.utils.signals import pass_on_signals
from quire.worker.device import Device
from quire.worker.input_batch import InputBatch, StepInputs
from quire.worker.kv_transfer import KVTransfer, Moved
from quire.worker.poison import poison
from quire.worker.proposer import Drafting

logger = get_logger(__name__)

_PROMPT_SLAB: Final = 2**24
"""Prompt logits held at once: 64 MiB of float32."""


@dataclass(slots=True)
class Outcome:
    """What one pass produced, before any of it becomes state."""

    sampled: dict[str, list[int]] = field(default_factory=dict)
    """The accepted drafts of each request, and one more token."""
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Parallel to `sampled`, for the requests that asked."""
    prompt_entries: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    pooled: dict[str, Pooled] = field(default_factory=dict)

    def merge(self, other: Outcome) -> Outcome:
        """Add another pass's results."""
        for name in self.__dataclass_fields__:
            getattr(self, name).update(getattr(other, name))
        return self


class ModelRunner:
    """Runs batches on one model.

    Args:
        model: Computes hidden states and logits.
        kv_caches: Keys and values per layer.
        input_batch: Empty state of the right size.
        device: Where the model and the caches are.
        groups: The layers of each group that has block tables of its own; none: one group.
        transfer: Moves blocks to and from the second tier, if there is one.
        drafting: Guesses tokens after those that were sampled, if drafts are wanted.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: list[KVCache],
        input_batch: InputBatch,
        device: Device,
        groups: Sequence[Sequence[int]] = (),
        transfer: KVTransfer | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.model = model
        self.kv_caches = kv_caches
        self.input_batch = input_batch
        self.device = device
        self._group_of = {layer: group for group, layers in enumerate(groups) for layer in layers}
        # Layers of several groups share memory: each once.
        self._tensors = {t.data_ptr(): t for pair in kv_caches for t in pair if t.numel()}
        self._transfer = transfer or KVTransfer(None)
        self._drafting = drafting
        self.sampler = Sampler(model.ops)
        self._poisons = envs.DEBUG_KV_CACHE
        self._fresh: list[tuple[BlockIds, int]] = []
        self._forward_seconds = self._sample_seconds = 0.0

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> BatchResult:
        """Compute a batch's tokens and sample where a request's known tokens end."""
        self._forward_seconds = self._sample_seconds = 0.0
        follow()
        failed = self._update_states(batch)
        moved = Moved()
        self._transfer.move_out(batch.swap_out, moved)
        self._copy_blocks(batch.block_copies)
        self._poison_fresh()
        self._transfer.move_in(batch.swap_in, moved)
        scheduled = batch.num_scheduled_tokens
        if failed:
            scheduled = {i: n for i, n in scheduled.items() if i not in failed}
        outcome = Outcome(failed=failed)
        if scheduled:
            outcome.merge(self._attempt(list(scheduled), list(scheduled.values())))
        result = self._commit(outcome)
        result.unwritten, result.unread = moved.unwritten, moved.unread
        result.swap_seconds = moved.seconds
        if self._drafting is not None and result.sampled_token_ids:
            req_ids = list(result.sampled_token_ids)
            known = [self.input_batch.tokens_of(req_id) for req_id in req_ids]
            result.draft_token_ids = self._drafting.drafts(req_ids, known)
        return result

    def reset(self) -> None:
        """Forget all requests."""
        self.input_batch.clear()
        self._fresh.clear()

    # ---- state -------------------------------------------------------------------------------

    def _update_states(self, batch: ScheduledBatch) -> dict[str, str]:
        """Apply what the batch says of requests; returns those that cannot be taken in."""
        failed: dict[str, str] = {}
        for req_id in (*batch.finished_req_ids, *batch.preempted_req_ids):
            self.input_batch.remove(req_id)
        for new in batch.scheduled_new_reqs:
            try:
                self.input_batch.add(new)
                self._fresh.append((new.block_ids, new.num_computed_tokens))
            except Exception as error:
                pass_on_signals(error)
                failed[new.req_id] = _reason(new.req_id, error)
                self.input_batch.remove(new.req_id)
        cached = batch.scheduled_cached_reqs
        for req_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            self.input_batch.advance(req_id, computed, blocks)
            if blocks:
                self._fresh.append((blocks, 0))
        for req_id, drafts in batch.scheduled_spec_tokens.items():
            self.input_batch.put_drafts(req_id, drafts)
        return failed

    def _poison_fresh(self) -> None:
        """For debugging: what requests have just been given holds nothing."""
        for tables, first in self._fresh if self._poisons else ():
            for group, block_ids in enumerate(tables):
                layers = (
                    i for i in range(len(self.kv_caches)) if self._group_of.get(i, 0) == group
                )
                caches = [self.kv_caches[i] for i in layers]
                poison(caches, block_ids, first, self.input_batch.block_size)
        self._fresh.clear()

    def _copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first tokens of blocks; all sources are read before any destination is
        written."""
        if not copies:
            return
        size = self.input_batch.block_size
        counts = [count for _, _, count in copies]
        offsets = np.concatenate([np.arange(count) for count in counts])
        starts = np.repeat(np.array([c[:2] for c in copies], dtype=np.int64) * size, counts, axis=0)
        source = self._tensor(starts[:, 0] + offsets)
        destination = self._tensor(starts[:, 1] + offsets)
        for cache in self._tensors.values():
            slots = cache.flatten(0, 1)
            slots.index_copy_(0, destination, slots.index_select(0, source))

    def _commit(self, outcome: Outcome) -> BatchResult:
        """Move the state on, and put the results in the scheduler's words."""
        pending = self.input_batch.prompt_logprobs
        for req_id, entries in outcome.prompt_entries.items():
            if req_id not in outcome.failed:
                pending[req_id].extend(entries)
        for req_id, token_ids in outcome.sampled.items():
            self.input_batch.append_tokens(req_id, token_ids)
        done = [i for i in outcome.sampled if i in pending] if pending else []
        return BatchResult(
            sampled_token_ids=outcome.sampled,
            logprobs=outcome.logprobs,
            prompt_logprobs={i: pending.pop(i) for i in done},
            failed=outcome.failed,
            forward_seconds=self._forward_seconds,
            sample_seconds=self._sample_seconds,
        )

    # ---- one pass ----------------------------------------------------------------------------

    def _attempt(self, req_ids: Sequence[str], counts: Sequence[int]) -> Outcome:
        """Run requests together; if that raises, in halves, down to the one that does it."""
        try:
            return self._run(req_ids, counts)
        except Exception as error:
            pass_on_signals(error)
            if len(req_ids) == 1:
                without = self.input_batch.num_known(req_ids[0], counts[0])
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
        inputs = self.input_batch.select(req_ids, counts)
        hidden = self._forward(inputs)
        outcome = Outcome()
        if self._wants_all():
            hidden = self._read_all(inputs, hidden, outcome)
        start = time.perf_counter()
        with scope("quire: sample"):
            self._sample(inputs, hidden, outcome)
        self._sample_seconds += time.perf_counter() - start
        return outcome

    def _forward(self, inputs: StepInputs) -> Tensor:
        start = time.perf_counter()
        positions = self._tensor(inputs.positions)
        metadata = self._metadata(inputs, positions)
        input_ids = self._tensor(inputs.input_ids)
        with scope("quire: forward"):
            hidden = self.model.forward(input_ids, positions, self.kv_caches, metadata)
        self.device.synchronize()
        self._forward_seconds += time.perf_counter() - start
        return hidden

    def _wants_all(self) -> bool:
        """Whether the hidden states of all tokens are needed, not only of those to sample from."""
        return bool(self.input_batch.prompt_logprobs)

    def _metadata(self, inputs: StepInputs, positions: Tensor) -> AttentionMetadata:
        some = not self._wants_all()
        first = AttentionMetadata(
            query_start_loc=self._tensor(inputs.query_start_loc),
            seq_lens=self._tensor(inputs.seq_lens),
            block_table=self._tensor(inputs.block_tables[0]),
            slot_mapping=self._tensor(inputs.slot_mappings[0]),
            token_request=self._tensor(inputs.token_request),
            positions=positions,
            block_size=self.input_batch.block_size,
            wanted=self._tensor(inputs.wanted) if some else None,
            wanted_start_loc=self._tensor(inputs.wanted_start_loc) if some else None,
        )
        if len(inputs.block_tables) == 1:
            return first
        groups = [
            replace(
                first,
                block_table=self._tensor(table),
                slot_mapping=self._tensor(slots),
                scratch={},
            )
            for table, slots in zip(inputs.block_tables, inputs.slot_mappings, strict=True)
        ]
        by_layer = [groups[self._group_of[i]] for i in range(len(self.kv_caches))]
        return replace(first, by_layer=by_layer)

    def _sample(self, inputs: StepInputs, hidden: Tensor, outcome: Outcome) -> None:
        """Logits and new tokens, only for requests whose known tokens end in this step.

        `hidden` has the last token of each of these, `[W, H]`.
        """
        which = inputs.samples.nonzero()[0]
        if not len(which):
            return
        num_drafts: np.ndarray | None = None
        if len(inputs.wanted) > len(which):
            which, num_drafts = _each_position(which, inputs.samples)
        rows = inputs.rows[which]
        requests = [self._sampling(row) for row in rows.tolist()]
        if any(request.active for request in requests):
            outputs = self.input_batch.outputs(rows, num_drafts)
            ahead = () if num_drafts is None else num_drafts.tolist()
            metadata = SamplingMetadata.build(requests, outputs, num_drafts=ahead)
            result = self.sampler(self.model.compute_logits(hidden, keep="logits"), metadata)
        else:
            result = self.sampler.take(self.model.compute_likeliest(hidden))
        if num_drafts is not None:
            places = self._confirmed(which, num_drafts, rows, result)
        else:
            places = range(len(which))
        owners = which.tolist()
        for place in places:
            req_id = inputs.req_ids[owners[place]]
            if place in result.failed:
                logger.error("request %s failed: %s", req_id, result.failed[place])
                outcome.failed[req_id] = result.failed[place]
                continue
            if req_id in outcome.failed:
                continue
            outcome.sampled.setdefault(req_id, []).append(result.token_ids[place])
            entry = result.logprobs[place]
            if entry is not None:
                outcome.logprobs.setdefault(req_id, []).append(TokenLogprobs(*entry))

    def _confirmed(
        self, which: np.ndarray, num_drafts: np.ndarray, rows: np.ndarray, result: SamplerOutput
    ) -> list[int]:
        """Places of the sampled tokens that hold: a request's first, and each whose drafts before
        it are what was sampled there. So the output is what it would be without drafts.

        A place that failed ends its request only if it is the first. Otherwise the tokens before
        it are output now, and the next step finds the failure again, as it would without drafts.
        """
        drafts = self.input_batch.drafts_after(rows, num_drafts)
        places: list[int] = []
        ended = -1
        for place, (owner, count) in enumerate(
            zip(which.tolist(), num_drafts.tolist(), strict=True)
        ):
            if owner == ended or (count and place in result.failed):
                ended = owner
                continue
            places.append(place)
            if place in result.failed or result.token_ids[place] != drafts[place]:
                ended = owner
        return places

    def _sampling(self, row: int) -> RequestSampling:
        sampling = self.input_batch.sampling[row]
        assert sampling is not None, f"row {row} has no request"
        return sampling

    # ---- prompt log-probabilities ------------------------------------------------------------

    def _read_all(self, inputs: StepInputs, hidden: Tensor, outcome: Outcome) -> Tensor:
        """Use the hidden states of all tokens; returns those to sample from."""
        self._score_prompts(inputs, hidden, outcome)
        return hidden[self._tensor(inputs.wanted)]

    def _score_prompts(self, inputs: StepInputs, hidden: Tensor, outcome: Outcome) -> None:
        """Log-probabilities of the prompt tokens that follow the positions of this step."""
        starts = inputs.query_start_loc.tolist()
        for index, req_id in enumerate(inputs.req_ids):
            if req_id not in self.input_batch.prompt_logprobs:
                continue
            row = int(inputs.rows[index])
            first = int(inputs.positions[starts[index]]) + 1
            end = min(int(inputs.seq_lens[index]) + 1, int(self.input_batch.num_prompt[row]))
            if end <= first:
                continue
            targets = self.input_batch.token_ids[row, first:end].astype(np.int64)
            chunk = hidden[starts[index] : starts[index] + len(targets)]
            entries = self._score(chunk, targets, self._sampling(row).params.prompt_logprobs or 0)
            if not all(math.isfinite(entry.logprobs[0]) for entry in entries):
                outcome.failed[req_id] = NOT_A_NUMBER
            outcome.prompt_entries[req_id] = [TokenLogprobs(*entry) for entry in entries]

    def _score(self, hidden: Tensor, targets: np.ndarray, count: int) -> list[LogprobRow]:
        """Entries of consecutive prompt tokens, in slabs that bound the memory of the logits."""
        entries: list[LogprobRow] = []
        at_once = max(1, _PROMPT_SLAB // self.input_batch.vocab_size)
        for start in range(0, len(targets), at_once):
            part = slice(start, start + at_once)
            ids = self._tensor(targets[part])
            logprobs = self.model.ops.log_softmax(self.model.compute_logits(hidden[part]))
            entries += gather_logprobs(logprobs, ids, [count] * len(ids), self.model.ops)
        return entries

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        where = self.device.torch_device
        return tensor if where.type == "cpu" else tensor.to(where, non_blocking=True)


def _each_position(which: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each sampled position: the index of its request, and the drafts before it."""
    counts = samples[which]
    firsts = np.cumsum(counts) - counts
    return np.repeat(which, counts), np.arange(counts.sum()) - np.repeat(firsts, counts)


def _reason(req_id: str, error: Exception) -> str:
    """What the caller is told; the exception itself goes to the log only."""
    logger.error("request %s failed alone in a step", req_id, exc_info=error)
    return f"internal error in the model step ({type(error).__name__}); see the server's log"
