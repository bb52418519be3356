"""Layers that share block lists: how they are grouped, and which blocks a group needs.

Layers of one window form groups of equal depth (number of layers), so that one block id means the
same bytes whatever group uses it: the layers at the same place of all groups share one tensor. A
request has one block list per group; a group with a window gives up the blocks behind it.

The depth is the smallest number of layers of one window (Gemma 3: 1 full layer for 5 with a
window, so 1 full group and 5 windowed ones), or the largest if that is at most a quarter more.
A group that is not filled wastes the rest of its pages. Layers of different windows are grouped
only if they keep equally many numbers per token; else, and with
`--disable-hybrid-kv-cache-manager`, all layers keep all tokens, in one group.

Knows no tensors, no requests and no pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.config.shape import LayerKV
from quire.utils.math import cdiv


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV stands in the same blocks."""

    layers: tuple[int, ...]
    """Indices of the layers; the place in here is the place in the page."""
    window: int | None = None
    """Positions a token sees, itself included; `None`: all before it."""


def form_groups(layers: Sequence[LayerKV], hybrid: bool = True) -> tuple[KVGroup, ...]:
    """Group the layers of a model; groups that keep all tokens come first.

    Args:
        layers: What each layer keeps.
        hybrid: False: one group that keeps all tokens.
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


def _numbers(layer: LayerKV) -> tuple[int, int]:
    """Numbers a layer keeps per token, of keys and of values."""
    return layer.num_kv_heads * layer.key_dim, layer.num_kv_heads * layer.value_dim


def _depth(counts: list[int]) -> int:
    return max(counts) if max(counts) <= 1.25 * min(counts) else min(counts)


def _evenly(indices: list[int], parts: int) -> list[list[int]]:
    """Consecutive parts whose lengths differ by at most one, the longer ones first."""
    short, longer = divmod(len(indices), parts)
    starts = [i * short + min(i, longer) for i in range(parts + 1)]
    return [indices[a:b] for a, b in zip(starts, starts[1:], strict=False)]


def page_layers(groups: Sequence[KVGroup]) -> tuple[int, ...]:
    """For each place of a page, a layer that shows its size."""
    return max((group.layers for group in groups), key=len)


def page_bytes(
    layers: Sequence[LayerKV], groups: Sequence[KVGroup], block_size: int, bytes_per_element: int
) -> int:
    """Bytes of one block, all places together."""
    per_token = sum(layers[i].bytes_per_token(bytes_per_element) for i in page_layers(groups))
    return per_token * block_size


def num_unseen_blocks(window: int | None, num_computed: int, block_size: int) -> int:
    """Blocks at the head of a request that none of its tokens from `num_computed` on sees."""
    if window is None:
        return 0
    return max(0, num_computed - window + 1) // block_size


def blocks_before(window: int, block_size: int) -> int:
    """Blocks that must be there before a block boundary so that what follows can be computed."""
    return cdiv(window - 1, block_size)


def most_blocks(window: int | None, num_tokens: int, chunk: int, block_size: int) -> int:
    """Blocks that a group holds at most for a request of `num_tokens` tokens, when no step
    computes more than `chunk` of them."""
    whole = cdiv(num_tokens, block_size)
    if window is None:
        return whole
    return min(whole, cdiv(window - 1 + chunk, block_size) + 1)


def blocks_per_request(
    windows: Sequence[int | None], num_tokens: int, chunk: int, block_size: int
) -> int:
    """Blocks that a request of `num_tokens` tokens holds at most, all groups together."""
    return sum(most_blocks(window, num_tokens, chunk, block_size) for window in windows)
