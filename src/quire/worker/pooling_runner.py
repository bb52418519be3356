"""Runs batches on pooling models: a `StepRunner` whose requests end with their prompt."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.batch import BatchResult, ScheduledBatch
from quire.kernels.cache_tensors import KVCache
from quire.models.pooling import DecoderForPooling, EncoderForPooling
from quire.worker.cache_blocks import CacheBlocks, group_of_layers
from quire.worker.device import Device
from quire.worker.forward_pass import EncoderForward, ForwardPass, PagedForward
from quire.worker.input_batch import InputBatch
from quire.worker.kv_transfer import KVTransfer
from quire.worker.pooling_head import PoolingHead
from quire.worker.step_runner import StepRunner


class PoolingRunner:
    """Runs batches on one pooling model.

    Args:
        model: An encoder or a decoder, with its pooler.
        kv_caches: Keys and values per layer; none for an encoder.
        input_batch: Empty state of the right size.
        device: Where the model and the caches are.
        groups: See `ModelRunner`.
        transfer: See `ModelRunner`.
    """

    def __init__(
        self,
        model: EncoderForPooling | DecoderForPooling,
        kv_caches: list[KVCache],
        input_batch: InputBatch,
        device: Device,
        groups: Sequence[Sequence[int]] = (),
        transfer: KVTransfer | None = None,
    ) -> None:
        self.model = model
        self._head = PoolingHead(model.pooler)
        group_of = group_of_layers(groups)
        size = input_batch.block_size
        forward: ForwardPass
        if isinstance(model, EncoderForPooling):
            forward = EncoderForward(model, device, self._head.token_types)
        else:
            forward = PagedForward(model, kv_caches, size, device, group_of)
        blocks = CacheBlocks(kv_caches, size, device, group_of, transfer)
        self._steps = StepRunner(forward, self._head, input_batch, blocks, device)

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        """Compute a batch's tokens and pool where a prompt ends."""
        self._head.take(batch)
        return self._steps.execute(batch)

    def reset(self) -> None:
        """Forget all requests."""
        self._steps.reset()
        self._head.forget()

    def release_blocks(self, block_ids: Sequence[int]) -> int:
        """Give the pages of KV blocks, in ascending order, back to the machine; gives their
        bytes."""
        return self._steps.release_blocks(block_ids)
