"""Rotary positions in plain torch, and rotating and storing in one operation.

The plain twin of the fused native operation. Knows no model: which dimensions turn, and how they
are paired, is said by `Rotation`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.cache_tensors import raw
from quire.kernels.kv_types import stored


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """How queries and keys are turned (Su et al. 2021, RoFormer)."""

    table: Tensor
    """Float32 `[P, R]`: R/2 cosines, then R/2 sines of each position. R dimensions turn."""
    interleaved: bool = False
    """Pairs are (2i, 2i + 1), as in GPT-J and GLM, instead of (i, i + R/2)."""
    offset: int = 0
    """First of the R dimensions of a head; the others stay as they are."""


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    rotation: Rotation,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor]:
    """Turn `q [T, H, D]` and `k [T, KVH, D]` by their positions `[T]`, then store k and v.

    Caches are `[num_blocks, block_size, KVH, D]`, slots `[T]` as in `write_kv`.

    Returns:
        The turned q and k, in the memory of the given ones.
    """
    angles = rotation.table.index_select(0, positions).unsqueeze(1)
    for x in (q, k):
        _turn(x, *angles.chunk(2, dim=-1), rotation)
    for x, cache in ((k, key_cache), (v, value_cache)):
        kept = raw(stored(x, cache.dtype))
        raw(cache).flatten(0, 1).index_copy_(0, slot_mapping, kept)
    return q, k


def _turn(x: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation) -> None:
    size = rotation.table.shape[1]
    part = x[..., rotation.offset : rotation.offset + size]
    first, second = (
        (part[..., ::2], part[..., 1::2]) if rotation.interleaved else part.chunk(2, dim=-1)
    )
    a, b = first.to(torch.float32), second.to(torch.float32)
    turned = a * cos - b * sin, b * cos + a * sin
    first.copy_(turned[0])
    second.copy_(turned[1])
