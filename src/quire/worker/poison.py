"""Fills KV blocks with NaN before a request gets them, so that a read of old content shows.

For `QUIRE_DEBUG_KV_CACHE`. Types of one byte get ones in all bits, which is NaN in them, or in the
scale behind them. Blocks that keep a cached prefix are left alone: what a request finds there is
its own. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.cache_tensors import KVCache


def poison(
    kv_caches: Sequence[KVCache], block_ids: Sequence[int], first: int, block_size: int
) -> None:
    """Forget what stands in a table's blocks from position `first` of the table on.

    Args:
        kv_caches: One per layer.
        block_ids: Blocks in the order of positions.
        first: Positions before it hold what the request will read.
        block_size: Tokens per block.
    """
    whole = -(-first // block_size)
    ids = torch.tensor(block_ids[whole:], dtype=torch.int64)
    for pair in kv_caches:
        for cache in pair:
            floats = cache.is_floating_point()
            garbage = torch.nan if floats else torch.iinfo(cache.dtype).max
            cache[ids.to(cache.device)] = garbage
            if first % block_size:
                cache[block_ids[whole - 1], first % block_size :] = garbage
