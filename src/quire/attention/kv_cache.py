"""The KV cache's tensors and their size in bytes. Which block holds what is decided elsewhere."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from quire import envs
from quire.config.kv_groups import KVGroup, form_groups, page_bytes, page_layers
from quire.config.shape import LayerKV
from quire.kernels.compiled import forbid_pages
from quire.kernels.dtypes import torch_dtype
from quire.utils.math import align_up


def kv_cache_bytes(
    layers: Sequence[LayerKV],
    num_blocks: int,
    block_size: int,
    dtype: str,
    groups: Sequence[KVGroup] | None = None,
) -> int:
    """Bytes of the cache, keys and values; all layers in one group unless `groups` are given."""
    element = torch_dtype(dtype).itemsize
    return num_blocks * page_bytes(
        layers, groups or form_groups(layers, False), block_size, element
    )


def allocate_kv_cache(
    layers: Sequence[LayerKV],
    num_blocks: int,
    block_size: int,
    dtype: str,
    device: str,
    groups: Sequence[KVGroup] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Zero-filled (key, value) of each layer, each `[num_blocks, block_size, KVH, D]`, KVH and D
    the layer's own. Layers at the same place of several groups share memory: a block belongs to
    one group at a time. Without `groups` no layers do.

    Raises:
        ConfigError: `dtype` is not one quire computes with.
    """
    kind = torch_dtype(dtype)

    def zeros(num_heads: int, dim: int) -> Tensor:
        size = (num_blocks, block_size, num_heads, dim)
        if torch.device(device).type == "cpu":
            return untouched_zeros(size, kind)
        return torch.zeros(size, dtype=kind, device=device)

    groups = groups or form_groups(layers, False)
    places = [
        (zeros(layer.num_kv_heads, layer.key_dim), zeros(layer.num_kv_heads, layer.value_dim))
        for layer in (layers[index] for index in page_layers(groups))
    ]
    caches: dict[int, tuple[Tensor, Tensor]] = {}
    for group in groups:
        for index, (key, value) in zip(group.layers, places, strict=False):
            layer, size = layers[index], (num_blocks, block_size, layers[index].num_kv_heads)
            caches[index] = key.view(*size, layer.key_dim), value.view(*size, layer.value_dim)
    return [caches[index] for index in range(len(layers))]


def untouched_zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on pages that the system provides when they are first written: a large cache costs
    neither start-up time nor memory before it is used.

    With `QUIRE_DEBUG_KV_CACHE`, between two pages that nobody may touch.
    """
    length = math.prod(size) * dtype.itemsize
    edge = mmap.PAGESIZE if envs.DEBUG_KV_CACHE else 0
    room = align_up(length, mmap.PAGESIZE) + 2 * edge
    if not room:
        return torch.empty(size, dtype=dtype)
    pages = torch.frombuffer(mmap.mmap(-1, room), dtype=torch.uint8)
    if edge:
        for place in (0, room - edge):
            forbid_pages(pages.data_ptr() + place, edge)
    # The end touches the second guard: reading past it is the likelier mistake.
    start = room - edge - length
    return pages[start : start + length].view(dtype).view(size)
