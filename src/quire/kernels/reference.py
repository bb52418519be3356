"""Every operation in plain torch: the definition that faster ones are tested against.

Each row's result depends on that row alone, bit for bit. Sums are float32; results are rounded
once to the type of the activations. Runs on any torch device. Knows nothing of models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import encoder
from quire.kernels.exact import exp, log, log_softmax, tree_sum
from quire.kernels.paged import paged_attention
from quire.kernels.tiles import linear, prepare_linear


def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of `weight` `[V, H]` for ids `[T]`: `[T, H]`."""
    return weight.index_select(0, input_ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension of `[..., H]`.

    x / sqrt(mean(x**2) + eps) in float32, rounded to x's type, then times `weight` (the order of
    Hugging Face's Llama).
    """
    wide = x.to(torch.float32)
    mean = tree_sum(wide * wide).div_(x.shape[-1])
    normed = wide / mean.add_(eps).sqrt_().unsqueeze(-1)
    if x.dtype != torch.float32:
        normed = normed.to(x.dtype).to(torch.float32)
    return normed.mul_(weight).to(x.dtype)


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`, the sum rounded to x's type first."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for `[T, 2 I]` holding gate and up side by side: `[T, I]`."""
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    return (gate / exp(-gate).add_(1.0)).mul_(up).to(x.dtype)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin_table: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate `q [T, H, D]` and `k [T, KVH, D]` by their positions `[T]` (rotate-half layout).

    `cos_sin_table` is float32 `[P, D]`: D/2 cosines, then D/2 sines of each position.
    """
    cos, sin = cos_sin_table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def write_kv(
    k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store `k, v [T, KVH, D]` at slots `[T]` (block * block_size + offset, all at least 0)."""
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slot_mapping, k)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slot_mapping, v)


OPS = encoder.OPS | {
    "embedding": embedding,
    "exp": exp,
    "linear": linear,
    "log": log,
    "log_softmax": log_softmax,
    "paged_attention": paged_attention,
    "prepare_linear": prepare_linear,
    "rms_norm": rms_norm,
    "rms_norm_add": rms_norm_add,
    "rotary": rotary,
    "silu_and_mul": silu_and_mul,
    "write_kv": write_kv,
}
