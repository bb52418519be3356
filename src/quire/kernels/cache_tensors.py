"""The KV cache of one layer as a record, so that who passes it on need not know what is in it.

Knows no request and no block's content.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """What one layer has kept of all tokens, `config.shape.LayerKV` being its layout.

    Iterating gives its tensors. Each begins with `[num_blocks, block_size, ...]`, so blocks are
    copied, moved and forgotten alike in all of them.
    """

    key: Tensor
    """`[num_blocks, block_size, KVH, K]`."""
    value: Tensor
    """`[num_blocks, block_size, KVH, V]`; V is 0 where values are part of the keys."""
    scales: Tensor | None = None
    """Float32 `[num_blocks, block_size, KVH, S]`: what short types are multiplied with. One block
    has its own, so that a block means the same wherever it is."""

    @property
    def dtype(self) -> torch.dtype:
        """Type that keys and values are kept in, which need not be the model's."""
        return self.key.dtype

    def __iter__(self) -> Iterator[Tensor]:
        yield self.key
        yield self.value
        if self.scales is not None:
            yield self.scales
