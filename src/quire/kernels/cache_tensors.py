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

    Iterating gives its tensors, those of one byte as plain bytes. Each begins with
    `[num_blocks, block_size, ...]`, so blocks are copied, moved and forgotten alike in all of them.
    """

    key: Tensor
    """`[num_blocks, block_size, KVH, K]`, of int8 `K + 4`: `quire.kernels.kv_types`."""
    value: Tensor
    """Likewise with V, which is 0 where values are part of the keys."""

    @property
    def dtype(self) -> torch.dtype:
        """Type that keys and values are kept in, which need not be the model's."""
        return self.key.dtype

    def __iter__(self) -> Iterator[Tensor]:
        yield raw(self.key)
        yield raw(self.value)


def raw(cache: Tensor) -> Tensor:
    """The same memory in a type for which torch has every operation that moves numbers."""
    return cache.view(torch.uint8) if cache.itemsize == 1 else cache
