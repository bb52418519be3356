"""Groups of layers that share a block list: how they are formed, and which blocks a group needs.

Layers with the same window form groups of equal depth (number of layers). The layers at the same
position in each group share one tensor, so a block id means the same bytes whichever group uses it.
A request has one block list per group; a group with a sliding window frees the blocks that fall out
of it.

The depth is the smallest number of layers with one window, or the largest such number if that is at
most a quarter more. (Gemma 3 has 1 full layer for every 5 with a window, which makes 1 full group
and 5 windowed ones.) A group with fewer layers than the depth wastes the rest of its pages. Layers
with different windows are grouped only if they store equally many numbers of one type per token.
Otherwise, and with `--disable-hybrid-kv-cache-manager`, all layers are in one group and keep all
tokens.

Knows no tensors, no requests and no pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.config.shape import LayerKV
from quire.utils.math import cdiv


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV is in the same blocks."""

    layers: tuple[int, ...]
    """Indices of the layers; a layer's position in this tuple is its position in the page."""
    window: int | None = None
    """Number of positions a token attends to, itself included; `None`: all up to itself."""


def form_groups(layers: Sequence[LayerKV], hybrid: bool = True) -> tuple[KVGroup, ...]:
    """Group the layers of a model; groups that keep all tokens come first.

    Args:
        layers: What each layer stores.
        hybrid: If false, there is one group that keeps all tokens.
    """
    everything = tuple(range(len(layers)))
    kinds: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(layer.window, []).append(index)
    if not hybrid or (len(kinds) > 1 and len({_numbers(layer) for layer in layers}) > 1):
        return (KVGroup(everything),)
    depth = _depth([len(kind) for kind in kinds.values()])
    ordered = sorted(kinds.items(), key=lambda kind: -(kind[0] or 2**62))
    return tuple(
        KVGroup(tuple(part), window)
        for window, indices in ordered
        for part in _evenly(indices, cdiv(len(indices), depth))
    )


def _numbers(layer: LayerKV) -> tuple[int, int, str | None]:
    """Elements a layer stores per token, of keys and of values, and their type."""
    key, value = layer.widths
    return layer.num_kv_heads * key, layer.num_kv_heads * value, layer.dtype


def _depth(counts: list[int]) -> int:
    return max(counts) if max(counts) <= 1.25 * min(counts) else min(counts)


def _evenly(indices: list[int], parts: int) -> list[list[int]]:
    """Consecutive parts whose lengths differ by at most one, the longer ones first."""
    short, longer = divmod(len(indices), parts)
    starts = [i * short + min(i, longer) for i in range(parts + 1)]
    return [indices[a:b] for a, b in zip(starts, starts[1:], strict=False)]


def page_layers(groups: Sequence[KVGroup]) -> tuple[int, ...]:
    """For each position in a page, one of the layers that use it, to tell its size."""
    return max((group.layers for group in groups), key=len)


def page_bytes(
    layers: Sequence[LayerKV], groups: Sequence[KVGroup], block_size: int, bytes_per_element: int
) -> int:
    """Bytes of one block, all layer positions together."""
    per_token = sum(layers[i].bytes_per_token(bytes_per_element) for i in page_layers(groups))
    return per_token * block_size


def num_unseen_blocks(window: int | None, num_computed: int, block_size: int) -> int:
    """Number of blocks at the beginning of a request that no token from `num_computed` on attends
    to."""
    if window is None:
        return 0
    return max(0, num_computed - window + 1) // block_size


def blocks_before(window: int, block_size: int) -> int:
    """Number of blocks before a block boundary that must be present to compute what follows it."""
    return cdiv(window - 1, block_size)


def most_blocks(window: int | None, num_tokens: int, chunk: int, block_size: int) -> int:
    """Largest number of blocks that a group holds for a request of `num_tokens` tokens if no step
    computes more than `chunk` of them."""
    whole = cdiv(num_tokens, block_size)
    if window is None:
        return whole
    return min(whole, cdiv(window - 1 + chunk, block_size) + 1)


def blocks_per_request(
    windows: Sequence[int | None], num_tokens: int, chunk: int, block_size: int
) -> int:
    """Largest number of blocks that a request of `num_tokens` tokens holds in all groups
    together."""
    return sum(most_blocks(window, num_tokens, chunk, block_size) for window in windows)
