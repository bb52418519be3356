"""The two halves of a usual decoder layer: grouped-query attention, and the MLP, gated or plain.

They read sizes and a `DecoderStyle`, never a family's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.config.leaves import head_leaves, inner_leaves
from quire.config.shape import LayerKV, ModelShape
from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.cache_tensors import KVCache
from quire.kernels.decoder import AttentionParts
from quire.layers.activation import activation, gate
from quire.layers.alibi import alibi_slopes
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.module import MLPBlock, Module
from quire.layers.norm import NORMS, Norm
from quire.layers.parameter import Parameter, Parameters
from quire.models.decoder_style import FULL, AttentionBlock, DecoderStyle, StepInput
from quire.models.kv_scales import kv_scale_parameters


class Attention(AttentionBlock):
    """Grouped-query attention."""

    def __init__(
        self,
        context: LayerContext,
        shape: ModelShape,
        style: DecoderStyle,
        index: int,
        keeps: LayerKV,
    ) -> None:
        self._ops = context.ops
        dim = keeps.key_dim
        self._heads = (shape.num_heads, keeps.num_kv_heads, dim)
        q, kv = shape.num_heads * dim, keeps.num_kv_heads * dim
        self._split = (q, kv, kv)
        self._spec = _spec(shape, style, index, keeps)
        self._has_sinks = style.sinks
        self._rope, self._plain_rope, self._interleaved = _rope(style, index, dim)
        self._clip = style.clip_qkv
        self._qkv_proj = Linear(
            context.at("qkv_proj"), shape.hidden_size, self._split, style.qkv_bias, keep="qkv"
        )
        leaves = head_leaves(shape.num_heads, keeps.num_kv_heads, dim)
        self._o_proj = Linear(
            context.at("o_proj"), q, shape.hidden_size, style.out_bias, leaves=leaves
        )
        self._norm_heads = style.qk_norm in ("head", "per_head")
        self._norms = _qk_norms(context, style, self._heads)

    def __call__(self, x: Tensor, kv_cache: KVCache, step: StepInput) -> Tensor:
        """`[T, H] -> [T, H]`; stores this step's keys and values."""
        heads, kv_heads, dim = self._heads
        qkv = self._qkv_proj(x)
        if self._clip:
            qkv.clamp_(-self._clip, self._clip)
        q, k, v = qkv.split(self._split, dim=-1)
        if self._norms and not self._norm_heads:
            q, k = self._normed(q, k)
        q, k, v = q.view(-1, heads, dim), k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
        if self._norm_heads:
            q, k = self._normed(q, k)
        q, k = self._rotated(q, k, step)
        out = step.attention.forward(q, k, v, kv_cache, step.metadata, self._spec)
        return self._o_proj(out.view(-1, heads * dim))

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        norms = self._norms
        return norms["q_norm"](q.contiguous()), norms["k_norm"](k.contiguous())

    def fused(self, step: StepInput) -> AttentionParts | None:
        """The loaded layer as data, if that can say it."""
        if self._clip or (self._norms and not self._norm_heads):
            return None
        norms = {name: norm.parts() for name, norm in self._norms.items()}
        qkv, out = self._qkv_proj.prepared, self._o_proj.prepared
        if qkv is None or out is None or None in norms.values():
            return None
        return AttentionParts(
            qkv,
            out,
            self._heads,
            self._spec,
            norms.get("q_norm"),
            norms.get("k_norm"),
            None if self._rope is None else step.rope_tables[self._rope],
            self._interleaved,
        )

    def _rotated(self, q: Tensor, k: Tensor, step: StepInput) -> tuple[Tensor, Tensor]:
        if self._rope is None:
            return q, k
        table = step.rope_tables[self._rope]
        if self._plain_rope:
            return self._ops.rotary(q, k, step.positions, table)
        return self._ops.rotary_partial(q, k, step.positions, table, self._interleaved)

    def children(self) -> Mapping[str, Module]:
        """`qkv_proj`, `o_proj`, and perhaps `q_norm`, `k_norm`."""
        return {"qkv_proj": self._qkv_proj, "o_proj": self._o_proj, **self._norms}

    def own_parameters(self) -> Parameters:
        """Perhaps `sinks`, and scales of keys and values if the checkpoint has some."""
        found = kv_scale_parameters(self._heads[1], self._take_scale)
        if self._has_sinks:
            shape = (self._heads[0],)
            found["sinks"] = Parameter(shape, self._load_sinks, dtype=torch.float32)
        return found

    def _take_scale(self, i: int, scale: float) -> None:
        scales = (scale, self._spec.kv_scales[1]) if i == 0 else (self._spec.kv_scales[0], scale)
        self._spec = dataclasses.replace(self._spec, kv_scales=scales)

    def _load_sinks(self, tensor: Tensor) -> None:
        self._spec = dataclasses.replace(self._spec, sinks=tensor.clone())


def _spec(shape: ModelShape, style: DecoderStyle, index: int, keeps: LayerKV) -> AttentionSpec:
    scale = keeps.key_dim**-0.5 if style.attention_scale is None else style.attention_scale
    if style.scale_by_layer:
        scale /= index + 1
    slopes = None
    if style.alibi:
        slopes = alibi_slopes(shape.num_heads, style.alibi, style.alibi_bias_max)
    return AttentionSpec(scale, keeps.window, style.attention_softcap, slopes)


def _rope(style: DecoderStyle, index: int, dim: int) -> tuple[str | None, bool, bool]:
    """The layer's table; whether it covers whole heads in halves; whether pairs interleave."""
    ropes = style.ropes or {}
    usual = FULL if FULL in ropes else None
    name = style.layer_ropes[index] if style.layer_ropes else usual
    if name is None:
        return None, False, False
    rope = ropes[name]
    return name, rope.dim == dim and not rope.interleaved, rope.interleaved


def _qk_norms(
    context: LayerContext, style: DecoderStyle, sizes: tuple[int, int, int]
) -> dict[str, Norm]:
    if not style.qk_norm:
        return {}
    make = NORMS[style.qk_norm_kind or style.norm]
    heads, kv_heads, dim = sizes
    size = {
        "head": lambda n: dim,
        "per_head": lambda n: (n, dim),
        "full": lambda n: n * dim,
    }[style.qk_norm]
    return {
        name: make(context, size(n), style.eps)
        for name, n in (("q_norm", heads), ("k_norm", kv_heads))
    }


class GatedMLP(MLPBlock):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, context: LayerContext, shape: ModelShape, style: DecoderStyle) -> None:
        size, inner = shape.hidden_size, shape.intermediate_size
        self._act = gate(style.activation or shape.hidden_act)
        at = context.at("gate_up_proj")
        self._gate_up_proj = Linear(
            at, size, (inner, inner), style.mlp_bias, gated=True, keep="mlp"
        )
        at = context.at("down_proj")
        self._down_proj = Linear(at, inner, size, style.mlp_bias, leaves=inner_leaves(inner))

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, H] -> [T, H]`."""
        return self._down_proj(self._gate_up_proj.gated(x, self._act))

    def fused(self) -> tuple[Any, Any, str] | None:
        """The loaded layer as data, if that can say it: gates and ups, down, activation."""
        gate_up, down = self._gate_up_proj.prepared, self._down_proj.prepared
        return None if gate_up is None or down is None else (gate_up, down, self._act)

    def children(self) -> Mapping[str, Module]:
        """`gate_up_proj` and `down_proj`."""
        return {"gate_up_proj": self._gate_up_proj, "down_proj": self._down_proj}


class PlainMLP(MLPBlock):
    """down(act(up(x)))."""

    def __init__(self, context: LayerContext, shape: ModelShape, style: DecoderStyle) -> None:
        size, inner = shape.hidden_size, shape.intermediate_size
        self._act = activation(context.ops, style.activation or shape.hidden_act, gated=False)
        self._up_proj = Linear(context.at("up_proj"), size, inner, style.mlp_bias)
        at = context.at("down_proj")
        self._down_proj = Linear(at, inner, size, style.mlp_bias, leaves=inner_leaves(inner))

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, H] -> [T, H]`."""
        return self._down_proj(self._act(self._up_proj(x)))

    def children(self) -> Mapping[str, Module]:
        """`up_proj` and `down_proj`."""
        return {"up_proj": self._up_proj, "down_proj": self._down_proj}
