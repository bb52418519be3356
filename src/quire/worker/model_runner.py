"""Runs batches on models that generate text: a `StepRunner` that samples, and then asks for drafts.

Family-free.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.batch import BatchResult, ScheduledBatch
from quire.kernels.cache_tensors import KVCache
from quire.models.base import CausalLM
from quire.worker.cache_blocks import CacheBlocks, group_of_layers
from quire.worker.decode_at_once import DecodeAtOnce
from quire.worker.device import Device
from quire.worker.forward_pass import PagedForward
from quire.worker.input_batch import InputBatch
from quire.worker.kv_transfer import KVTransfer
from quire.worker.proposer import Drafting
from quire.worker.sampling_head import SamplingHead
from quire.worker.step_runner import StepRunner


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
        self.input_batch = input_batch
        self._drafting = drafting
        group_of = group_of_layers(groups)
        size = input_batch.block_size
        several = len(input_batch.block_tables) > 1
        head = SamplingHead(model, input_batch, device)
        self._steps = StepRunner(
            PagedForward(model, kv_caches, size, device, group_of),
            head,
            input_batch,
            CacheBlocks(kv_caches, size, device, group_of, transfer),
            device,
            None if several else DecodeAtOnce(model, input_batch, kv_caches, head),
        )

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        """Compute a batch's tokens and sample where a request's known tokens end."""
        result = self._steps.execute(batch)
        if self._drafting is not None and result.sampled_token_ids:
            req_ids = list(result.sampled_token_ids)
            known = [self.input_batch.tokens_of(req_id) for req_id in req_ids]
            result.draft_token_ids = self._drafting.drafts(req_ids, known)
        return result

    def reset(self) -> None:
        """Forget all requests."""
        self._steps.reset()

    def release_blocks(self, block_ids: Sequence[int]) -> int:
        """Give the pages of KV blocks, in ascending order, back to the machine; gives their
        bytes."""
        return self._steps.release_blocks(block_ids)
