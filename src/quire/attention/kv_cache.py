"""The KV cache's tensors and their size in bytes. Which block holds what is decided elsewhere."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.config.shape import LayerKV
from quire.kernels.dtypes import torch_dtype


def kv_cache_bytes(layers: Sequence[LayerKV], num_blocks: int, block_size: int, dtype: str) -> int:
    """Bytes of the cache over all layers, keys and values."""
    element = torch_dtype(dtype).itemsize
    return num_blocks * block_size * sum(layer.bytes_per_token(element) for layer in layers)


def allocate_kv_cache(
    layers: Sequence[LayerKV], num_blocks: int, block_size: int, dtype: str, device: str
) -> list[tuple[Tensor, Tensor]]:
    """Zero-filled (key, value) of each layer, each `[num_blocks, block_size, KVH, D]`, KVH and D
    the layer's own.

    Raises:
        ConfigError: `dtype` is not one quire computes with.
    """
    kind = torch_dtype(dtype)

    def zeros(num_heads: int, dim: int) -> Tensor:
        size = (num_blocks, block_size, num_heads, dim)
        if torch.device(device).type == "cpu":
            return _untouched_zeros(size, kind)
        return torch.zeros(size, dtype=kind, device=device)

    return [
        (zeros(layer.num_kv_heads, layer.key_dim), zeros(layer.num_kv_heads, layer.value_dim))
        for layer in layers
    ]


def _untouched_zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on pages that the system provides when they are first written: a large cache costs
    neither start-up time nor memory before it is used."""
    if 0 in size:  # values that are part of the keys
        return torch.empty(size, dtype=dtype)
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(size)
