"""What a batch does to the KV cache before the model runs: copies within it, and to and from the
second tier. Knows blocks and layers, but no requests and no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire import envs
from quire.attention.kv_cache import give_back
from quire.core.batch import BlockIds, ScheduledBatch
from quire.kernels.cache_tensors import KVCache
from quire.worker.device import Device
from quire.worker.kv_transfer import KVTransfer, Moved
from quire.worker.pages_ahead import PagesAhead
from quire.worker.poison import poison
from quire.worker.tensors import to_tensor_on


class CacheBlocks:
    """The blocks of one model's KV cache.

    Args:
        kv_caches: Keys and values per layer; none for an encoder.
        block_size: Tokens per block.
        device: Where the caches are.
        group_of: The group of each layer that has block tables of its own; absent: group 0.
        transfer: Moves blocks to and from the second tier, if there is one.
    """

    def __init__(
        self,
        kv_caches: Sequence[KVCache],
        block_size: int,
        device: Device,
        group_of: dict[int, int] | None = None,
        transfer: KVTransfer | None = None,
    ) -> None:
        self._kv_caches = kv_caches
        self._block_size = block_size
        self._tensor = to_tensor_on(device)
        self._group_of = group_of or {}
        # Layers of several groups share memory: each once.
        self._tensors = {t.data_ptr(): t for pair in kv_caches for t in pair if t.numel()}
        on_host = [t for t in self._tensors.values() if t.device.type == "cpu"]
        self._pages = PagesAhead(on_host) if on_host else None
        self._transfer = transfer or KVTransfer(None)
        self._poisons = envs.DEBUG_KV_CACHE
        self._fresh: list[tuple[BlockIds, int]] = []

    def note_fresh(self, block_ids: BlockIds, first: int) -> None:
        """A request was given blocks, of which it will read the first `first` positions."""
        self._fresh.append((block_ids, first))
        if self._pages is not None:
            self._pages.used(max((max(ids) for ids in block_ids if ids), default=0))

    def prepare(self, batch: ScheduledBatch) -> Moved:
        """Do all copies of a batch, in an order in which each reads the right content.

        Blocks are copied to the second tier before anything overwrites them. Copies within the
        cache come before content is read back from the tier, because that may overwrite their
        sources.
        """
        if batch.swap_out or batch.block_copies or batch.swap_in or self._poisons:
            return self._copy_all(batch)
        self._fresh.clear()
        return Moved()

    @torch.inference_mode()
    def _copy_all(self, batch: ScheduledBatch) -> Moved:
        moved = Moved()
        self._transfer.move_out(batch.swap_out, moved)
        self.copy(batch.block_copies)
        self._poison_fresh()
        self._transfer.move_in(batch.swap_in, moved)
        return moved

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first tokens of blocks: (from, to, tokens).

        All sources are read before any destination is written.
        """
        if not copies:
            return
        counts = [count for _, _, count in copies]
        offsets = np.concatenate([np.arange(count) for count in counts])
        firsts = np.array([c[:2] for c in copies], dtype=np.int64) * self._block_size
        starts = np.repeat(firsts, counts, axis=0)
        source = self._tensor(starts[:, 0] + offsets)
        destination = self._tensor(starts[:, 1] + offsets)
        for cache in self._tensors.values():
            slots = cache.flatten(0, 1)
            slots.index_copy_(0, destination, slots.index_select(0, source))

    def forget(self) -> None:
        """Forget the blocks that requests were given."""
        self._fresh.clear()

    def release(self, block_ids: Sequence[int]) -> int:
        """Give the pages of blocks back to the machine. They read as zeros until they are written.

        Args:
            block_ids: In ascending order.

        Returns:
            Bytes of whole pages.
        """
        if self._pages is not None:
            self._pages.stop()  # else it might ask for pages that have just been given back
        runs = _runs(block_ids)
        return sum(give_back(t, a, b) for t in self._tensors.values() for a, b in runs)

    def _poison_fresh(self) -> None:
        """For debugging: overwrite blocks that requests have just been given with NaN."""
        for tables, first in self._fresh if self._poisons else ():
            for group, block_ids in enumerate(tables):
                caches = [
                    cache
                    for layer, cache in enumerate(self._kv_caches)
                    if self._group_of.get(layer, 0) == group
                ]
                poison(caches, block_ids, first, self._block_size)
        self._fresh.clear()


def _runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Beginning and end of each run of consecutive numbers."""
    numbers = np.array(ids, dtype=np.int64)
    if not len(numbers):
        return []
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(numbers, breaks)]


def group_of_layers(groups: Sequence[Sequence[int]]) -> dict[int, int]:
    """The group of each layer, from the layers of each group. Without groups, all layers are in
    group 0."""
    return {layer: group for group, layers in enumerate(groups) for layer in layers}
