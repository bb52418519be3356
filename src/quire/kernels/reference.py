"""Every operation in plain torch: the definition that faster ones are tested against.

Each row's result depends on that row alone, bit for bit. Sums are float32; results are rounded
once to the type of the activations. Runs on any torch device. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from quire.kernels import exact
from quire.kernels.cache_tensors import raw
from quire.kernels.coded_linear import prepare_coded
from quire.kernels.decoder import fuse_decoder
from quire.kernels.dispatch import Implementation
from quire.kernels.encoder import encoder_attention
from quire.kernels.exact import erf, exp, log, log_softmax, tree_sum
from quire.kernels.kv_types import stored
from quire.kernels.moe import clamped_swiglu, grouped_experts, route_experts
from quire.kernels.paged import paged_attention
from quire.kernels.rows import finite_rows, keep_allowed, largest_columns
from quire.kernels.tiles import Multiplier, add_leaves, linear, prepare_linear, wide_linear


def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of `weight` `[V, H]` for ids `[T]`: `[T, H]`."""
    return weight.index_select(0, input_ids)


def embedding_of(input_ids: Tensor, layer: Multiplier, dtype: torch.dtype) -> Tensor:
    """Rows of a prepared weight `[V, H]` for ids `[T]`: `[T, H]` of `dtype`.

    For an embedding that shares its memory with the head.
    """
    return layer.weight.index_select(0, input_ids).to(dtype)


def likeliest(x: Tensor, layer: Multiplier) -> Tensor:
    """Column of the largest number of each row of `linear(x, layer, float32)`: int64 `[T]`.

    The lowest one among equals; -1 where some number of the row is not finite.
    """
    return largest_columns(linear(x, layer, torch.float32))


def linear_add(x: Tensor, layer: Multiplier, residual: Tensor) -> Tensor:
    """`residual + linear(x)`, rounded once: `[T, N]`, in the memory of `residual`.

    In this order: the sums of the leaves, their tree, bias, residual.
    """
    return residual.copy_(wide_linear(x, layer).add_(residual))


def gated_linear(
    x: Tensor, layer: Multiplier, activation: str = "silu", keep: str | None = None
) -> Tensor:
    """act(gate) * up for a layer whose rows are gates, then ups: `[T, K] -> [T, N / 2]`.

    Rounded once. `activation` is `silu`, `gelu` or `gelu_tanh`; `keep` as in `linear`.
    """
    del keep
    act = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}[activation]
    gate, up = wide_linear(x, layer).chunk(2, dim=-1)
    return act(gate).mul_(up).to(x.dtype)


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


def rms_norm_wide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Like `rms_norm`, but rounded once, after the multiplication (Gemma, OLMo 2).

    `weight` may be float32 whatever x is.
    """
    wide = x.to(torch.float32)
    mean = tree_sum(wide * wide).div_(x.shape[-1])
    return (wide / mean.add_(eps).sqrt_().unsqueeze(-1)).mul_(weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dimension of `[..., H]` (Ba et al. 2016), rounded once.

    (x - mean) / sqrt(mean((x - mean)**2) + eps) * weight + bias in float32. `weight` and `bias`
    are `[H]`, or have more of x's last dimensions: one norm per head.
    """
    wide = x.to(torch.float32)
    wide = wide - tree_sum(wide).div_(x.shape[-1]).unsqueeze(-1)
    variance = tree_sum(wide * wide).div_(x.shape[-1])
    wide.div_(variance.add_(eps).sqrt_().unsqueeze(-1))
    if weight is not None:
        wide.mul_(weight)
    if bias is not None:
        wide.add_(bias)
    return wide.to(x.dtype)


def relu(x: Tensor) -> Tensor:
    """max(x, 0), and 0 for -0; NaN stays."""
    return x.masked_fill(x <= 0, 0.0)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))."""
    return _silu(x.to(torch.float32)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """x / 2 * (1 + erf(x / sqrt(2))) (Hendrycks & Gimpel 2016)."""
    return _gelu(x.to(torch.float32)).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3)))."""
    return _gelu_tanh(x.to(torch.float32)).to(x.dtype)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return exact.tanh(x.to(torch.float32)).to(x.dtype)


def _silu(x: Tensor) -> Tensor:
    return x / exp(-x).add_(1.0)


def _gelu(x: Tensor) -> Tensor:
    return erf(x * 0.7071067811865476).add_(1.0).mul_(x).mul_(0.5)


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = (x * x).mul_(0.044715).add_(1.0).mul_(x).mul_(0.7978845608028654)
    return exact.tanh(inner).add_(1.0).mul_(x).mul_(0.5)


def gelu_and_mul(x: Tensor) -> Tensor:
    """gelu(gate) * up for `[T, 2 I]` holding gate and up side by side: `[T, I]`."""
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    return _gelu(gate).mul_(up).to(x.dtype)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """gelu_tanh(gate) * up for `[T, 2 I]` holding gate and up side by side: `[T, I]`."""
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    return _gelu_tanh(gate).mul_(up).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for `[T, 2 I]` holding gate and up side by side: `[T, I]`."""
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    return _silu(gate).mul_(up).to(x.dtype)


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


def rotary_partial(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin_table: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Like `rotary`, for the first R dimensions of each head; the others are copied.

    `cos_sin_table` is `[P, R]`. Pair i is (i, i + R/2) or, if `interleaved`, (2i, 2i + 1).
    """
    cos, sin = cos_sin_table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    rotate = _rotate_pairs if interleaved else _rotate
    parts = [(x[..., : cos_sin_table.shape[1]], x[..., cos_sin_table.shape[1] :]) for x in (q, k)]
    turned = [torch.cat((rotate(head, cos, sin), rest), dim=-1) for head, rest in parts]
    return turned[0], turned[1]


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.float32).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def write_kv(
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Store `k, v [T, KVH, D]` at slots `[T]` (block * block_size + offset, all at least 0), as the
    caches keep them (`kv_types`).

    The width of values may differ from that of keys, and be 0: then there are none to store.
    """
    for x, cache, scale in ((k, key_cache, scales[0]), (v, value_cache, scales[1])):
        kept = raw(stored(x, cache.dtype, scale))
        raw(cache).flatten(0, 1).index_copy_(0, slot_mapping, kept)


OPS: Final[dict[str, Callable[..., Any] | None]] = {
    "add_leaves": add_leaves,
    "clamped_swiglu": clamped_swiglu,
    "embedding": embedding,
    "embedding_of": embedding_of,
    "encoder_attention": encoder_attention,
    "exp": exp,
    "finite_rows": finite_rows,
    "fuse_decoder": fuse_decoder,
    "gated_linear": gated_linear,
    "gelu": gelu,
    "gelu_and_mul": gelu_and_mul,
    "gelu_tanh": gelu_tanh,
    "gelu_tanh_and_mul": gelu_tanh_and_mul,
    "keep_allowed": keep_allowed,
    # Plain copies of what is in the checkpoint: it is as quick to read that again.
    "keep_linear": None,
    "layer_norm": layer_norm,
    "likeliest": likeliest,
    "linear": linear,
    "linear_add": linear_add,
    "log": log,
    "log_softmax": log_softmax,
    "paged_attention": paged_attention,
    # The sampler's own steps are the plain ones.
    "pick_tokens": None,
    "prepare_coded": prepare_coded,
    "prepare_linear": prepare_linear,
    "relu": relu,
    "restore_linear": None,
    "rms_norm": rms_norm,
    "rms_norm_add": rms_norm_add,
    "rms_norm_wide": rms_norm_wide,
    "rotary": rotary,
    "rotary_partial": rotary_partial,
    "route_experts": route_experts,
    "silu": silu,
    "silu_and_mul": silu_and_mul,
    "tanh": tanh,
    "top_logprobs": None,
    "write_kv": write_kv,
}
"""All operations but those made of others."""
IMPLEMENTATION: Final = Implementation(OPS, combined={"grouped_experts": grouped_experts})
"""The row of `dispatch.IMPLEMENTATIONS`."""
