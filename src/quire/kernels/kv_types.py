"""Keys and values in types of one byte: what is written, and what it means when it is read.

- `float8_e4m3fn`, `float8_e5m2`: the number divided by a scale of the layer, rounded to nearest
  even, cut at the largest number of the type. The scale comes back in scores and sums.
- `int8`: symmetric, per token and head: `quantise_rows`. The float32 scale stands in the four bytes
  behind the head's codes, so it goes wherever they go: a block means the same in every place. The
  native kernels multiply scores and weights with it, not the codes.

A token's bytes depend on that token alone. Knows no blocks; the native twin is csrc/kv_types.h.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from quire.config.shape import KV_TAILS
from quire.kernels.coded_linear import quantise_rows

TAILS: Final = {getattr(torch, name): size for name, size in KV_TAILS.items()}
"""Elements behind the numbers of a head that hold their scale."""


def head_dim(cache: Tensor) -> int:
    """Numbers of a head in a cache `[num_blocks, block_size, KVH, D + tail]`."""
    width = cache.shape[-1]
    return width - TAILS.get(cache.dtype, 0) if width else 0


def stored(x: Tensor, kind: torch.dtype, scale: float = 1.0) -> Tensor:
    """`x [..., D]` as a cache of that type keeps it: `[..., D + tail]`."""
    if not x.shape[-1]:
        return x.to(kind)
    if kind in TAILS:
        codes, factors = quantise_rows(x.reshape(-1, x.shape[-1]))
        tail = factors.unsqueeze(1).view(torch.int8)
        return torch.cat((codes, tail), 1).view(*x.shape[:-1], -1)
    if kind.itemsize > 1:
        return x.to(kind)
    most = torch.finfo(kind).max
    return (x.to(torch.float32) / scale).clamp(-most, most).to(kind)


def scale_of(cache: Tensor, scale: float) -> float:
    """What numbers in this cache are to be multiplied with, `scale` being the layer's."""
    return scale if cache.dtype.itemsize == 1 and cache.dtype not in TAILS else 1.0


def numbers(kept: Tensor, dim: int, tail_at: int) -> Tensor:
    """The first `dim` numbers of each head as float32, the scale of the layer left out.

    Args:
        kept: `[..., D + tail]`.
        dim: At most D.
        tail_at: D.
    """
    wide = kept[..., :dim].to(torch.float32)
    if tail := TAILS.get(kept.dtype):
        wide *= kept[..., tail_at : tail_at + tail].contiguous().view(torch.float32)
    return wide
