"""The KV cache's tensors and their size in bytes. Which block holds what is decided elsewhere."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from quire.config.shape import ModelShape
from quire.kernels.dtypes import torch_dtype


def kv_cache_bytes(shape: ModelShape, num_blocks: int, block_size: int, dtype: str) -> int:
    """Bytes of the cache over all layers, keys and values."""
    per_token = shape.kv_bytes_per_token(torch_dtype(dtype).itemsize)
    return num_blocks * block_size * per_token


def allocate_kv_cache(
    shape: ModelShape, num_blocks: int, block_size: int, dtype: str, device: str
) -> list[tuple[Tensor, Tensor]]:
    """Zero-filled (key, value) of each layer, each `[num_blocks, block_size, KVH, D]`.

    Raises:
        ConfigError: `dtype` is not one quire computes with.
    """
    size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
    kind = torch_dtype(dtype)

    def zeros() -> Tensor:
        if torch.device(device).type == "cpu":
            return _untouched_zeros(size, kind)
        return torch.zeros(size, dtype=kind, device=device)

    return [(zeros(), zeros()) for _ in range(shape.num_layers)]


def _untouched_zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on pages that the system provides when they are first written: a large cache costs
    neither start-up time nor memory before it is used."""
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(size)
