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
from quire.kernels.cache_tensors import KVCache
from quire.kernels.compiled import forbid_pages
from quire.kernels.dtypes import stored_dtype, torch_dtype
from quire.kernels.pages import large_pages
from quire.utils.host import call_libc
from quire.utils.math import align_up


def kv_cache_bytes(
    layers: Sequence[LayerKV],
    num_blocks: int,
    block_size: int,
    dtype: str,
    groups: Sequence[KVGroup] | None = None,
) -> int:
    """Bytes of the cache, scales included; all layers in one group unless `groups` are given."""
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
) -> list[KVCache]:
    """Zero-filled cache of each layer; heads, widths and, if it has one, the type are the layer's
    own. Layers at the same place of several groups share memory: a block belongs to one
    group at a time. Without `groups` no layers do.

    Args:
        layers: What each keeps of a token.
        num_blocks: Blocks in each tensor.
        block_size: Tokens per block.
        dtype: Type of layers that say none.
        device: As torch names it.
        groups: As the scheduler goes by them.

    Raises:
        ConfigError: `dtype` is not one quire computes with.
    """
    groups = groups or form_groups(layers, False)
    places = [
        [_zeros((num_blocks, block_size, heads, width), kind, device) for heads, width, kind in row]
        for row in (_tensors_of(layers[index], dtype) for index in page_layers(groups))
    ]
    caches: dict[int, KVCache] = {}
    for group in groups:
        for index, memory in zip(group.layers, places, strict=False):
            wanted = _tensors_of(layers[index], dtype)
            caches[index] = KVCache(
                *(
                    tensor.view(num_blocks, block_size, heads, width)
                    for tensor, (heads, width, _) in zip(memory, wanted, strict=True)
                )
            )
    return [caches[index] for index in range(len(layers))]


def _tensors_of(layer: LayerKV, dtype: str) -> list[tuple[int, int, torch.dtype]]:
    """KV heads, width and type of each of a layer's tensors: keys and values."""
    heads, kind = layer.num_kv_heads, torch_dtype(dtype)
    if layer.dtype is not None:
        kind = stored_dtype(layer.dtype)
    return [(heads, width, kind) for width in layer.widths]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    if torch.device(device).type == "cpu":
        return untouched_zeros(size, dtype)
    return torch.zeros(size, dtype=dtype, device=device)


def give_back(cache: Tensor, first: int, end: int) -> int:
    """Let the system have the whole pages of `cache[first:end]`: they read as zeros then, and come
    anew when they are written. Of a large page that is given in part, the process no longer holds
    the part; the system takes it when it needs memory.

    Args:
        cache: From `allocate_kv_cache`; on another device than the CPU nothing happens.

    Returns:
        Bytes of these pages; 0 also where the system does not take them.
    """
    if cache.device.type != "cpu" or not hasattr(mmap, "MADV_DONTNEED"):
        return 0
    size = cache.stride(0) * cache.itemsize
    start = align_up(cache.data_ptr() + first * size, mmap.PAGESIZE)
    length = (cache.data_ptr() + end * size) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length <= 0 or call_libc("madvise", start, length, mmap.MADV_DONTNEED):
        return 0
    return length


def untouched_zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on large pages that the system provides when they are first written: a large cache
    costs neither start-up time nor memory before it is used.

    With `QUIRE_DEBUG_KV_CACHE`, on small ones between two pages that nobody may touch.
    """
    length = math.prod(size) * dtype.itemsize
    memory = _guarded(length) if envs.DEBUG_KV_CACHE else large_pages(length)
    return memory.view(dtype).view(size)


def _guarded(length: int) -> Tensor:
    edge = mmap.PAGESIZE
    room = align_up(length, mmap.PAGESIZE) + 2 * edge
    # Private: of shared pages, the default, `give_back` would give none.
    pages = torch.frombuffer(
        mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    )
    for place in (0, room - edge):
        forbid_pages(pages.data_ptr() + place, edge)
    # The end touches the second guard: reading past it is the likelier mistake.
    start = room - edge - length
    return pages[start : start + length]
