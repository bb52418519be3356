"""Pages of KV blocks go back to the system, and only those."""

from __future__ import annotations

import sys

import pytest
import torch

from quire.attention.kv_cache import allocate_kv_cache
from quire.config.shape import LayerKV
from quire.utils.host import held_memory
from quire.worker.cache_blocks import CacheBlocks
from quire.worker.device import CpuDevice

BLOCKS, BLOCK = 512, 16


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back with MADV_DONTNEED")
@pytest.mark.parametrize("width", [64, 24], ids=["whole pages", "blocks that share pages"])
def test_only_the_pages_of_these_blocks(width: int) -> None:
    import os

    layers = [LayerKV(4, width, width)] * 4
    caches = allocate_kv_cache(layers, BLOCKS, BLOCK, "float32", "cpu")
    for cache in caches:
        for tensor in cache:
            tensor.fill_(3.0)
    blocks = CacheBlocks(caches, BLOCK, CpuDevice())
    gone = [5, *range(20, 400), 511]
    before = held_memory(os.getpid()) or 0
    freed = blocks.release(gone)
    after = held_memory(os.getpid()) or 0
    size = BLOCK * 4 * width * 4
    assert 380 * size * 8 - 8 * 2 * 4096 <= freed <= len(gone) * size * 8
    assert before - after > 0.9 * freed
    kept = [i for i in range(BLOCKS) if i not in gone]
    for cache in caches:
        for tensor in cache:
            assert torch.all(tensor[kept] == 3.0)
            assert not tensor[30:390].any()
            tensor[gone] = 4.0
            assert torch.all(tensor[gone] == 4.0) and torch.all(tensor[kept] == 3.0)
    assert blocks.release([]) == 0
