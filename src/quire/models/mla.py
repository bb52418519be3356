"""Multi-head latent attention (DeepSeek-V2, section 2.1), in its absorbed form.

A token keeps one latent vector and one rotated key part for all heads. The up-projections of keys
and values are not applied to what is kept: a query is taken into the latent space instead, and
the weighted sum of latents is taken out of it. So the cache holds `kv_lora_rank +
qk_rope_head_dim` numbers per token and layer, and prompt and decode rows are computed alike.

Knows sizes, no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.config.leaves import head_leaves
from quire.config.shape import LayerKV
from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.cache_tensors import KVCache
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.linear_method import LinearSpec
from quire.layers.module import Module
from quire.layers.norm import RMSNorm
from quire.layers.parameter import KeptForm, Parameter, Parameters
from quire.models.decoder_style import AttentionBlock, StepInput
from quire.models.kv_scales import kv_scale_parameters
from quire.quantization.checkpoint import read_as_floats


@dataclass(frozen=True, slots=True)
class MLASizes:
    """Sizes and constants of a latent attention, under Hugging Face's names."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    """`None`: queries are projected in one step."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    """Factor of `q.k`, all of it."""
    bias: bool = False
    """Bias of the first projections and of the last one."""
    interleaved: bool = True
    """Rotary pairs stand side by side, not half a vector apart."""
    eps: float = 1e-6
    """Of the norms of the latents."""

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query before it enters the latent space."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def layer_kv(self) -> LayerKV:
        """What a layer keeps of a token: the latent and the rotated part; values are in it."""
        return LayerKV(1, self.kv_lora_rank + self.qk_rope_head_dim, 0)


class PerHead:
    """One matrix per head: `[T, heads, K] -> [T, heads, N]`."""

    def __init__(self, context: LayerContext) -> None:
        self._ops = context.ops
        self._prepared: list[Any] = []

    def load(self, weights: Tensor) -> None:
        """Keep `[heads, N, K]`."""
        self._prepared = [self._ops.prepare_linear(weight) for weight in weights]

    def keep(self) -> list[Any]:
        """See `KeptForm`; for operations that have `keep_linear`."""
        assert self._ops.keep_linear is not None
        return [self._ops.keep_linear(weight) for weight in self._prepared]

    def restore(self, kept: list[Any]) -> None:
        """See `KeptForm`."""
        assert self._ops.restore_linear is not None
        self._prepared = [self._ops.restore_linear(weight) for weight in kept]

    def __call__(self, x: Tensor) -> Tensor:
        """Each head's rows times that head's matrix."""
        heads = zip(x.unbind(1), self._prepared, strict=True)
        linear = self._ops.linear
        return torch.stack([linear(rows.contiguous(), weight) for rows, weight in heads], 1)


class LatentAttention(AttentionBlock):
    """Stands at the place of `quire.models.decoder.Attention`."""

    def __init__(self, context: LayerContext, sizes: MLASizes) -> None:
        self._ops = context.ops
        self._context = context
        self._sizes = sizes
        hidden, heads, rank = sizes.hidden_size, sizes.num_heads, sizes.kv_lora_rank
        self._spec = AttentionSpec(sizes.scale, latent_dim=rank)
        wide = heads * sizes.qk_head_dim
        self._q_a_proj: Linear | None = None
        self._q_a_layernorm: RMSNorm | None = None
        if sizes.q_lora_rank is not None:
            at = context.at("q_a_proj")
            self._q_a_proj = Linear(at, hidden, sizes.q_lora_rank, sizes.bias)
            self._q_a_layernorm = RMSNorm(context, sizes.q_lora_rank, sizes.eps)
        self._q_name = "q_b_proj" if self._q_a_proj else "q_proj"
        at = context.at(self._q_name)
        self._q_proj = Linear(at, sizes.q_lora_rank or hidden, wide, False)
        at = context.at("kv_a_proj_with_mqa")
        self._kv_a_proj = Linear(at, hidden, rank + sizes.qk_rope_head_dim, sizes.bias)
        self._kv_a_layernorm = RMSNorm(context, rank, sizes.eps)
        self._into_latent, self._out_of_latent = PerHead(context), PerHead(context)
        # Every rank keeps the latents: its heads share them as one KV head.
        leaves = head_leaves(heads, 1, sizes.v_head_dim)
        at, wide = context.at("o_proj"), heads * sizes.v_head_dim
        self._o_proj = Linear(at, wide, hidden, sizes.bias, leaves=leaves)

    def __call__(self, x: Tensor, kv_cache: KVCache, step: StepInput) -> Tensor:
        """`[T, H] -> [T, H]`; stores this step's latents."""
        sizes = self._sizes
        q, q_rope = self._queries(x).split((sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), -1)
        parts = (sizes.kv_lora_rank, sizes.qk_rope_head_dim)
        latent, k_rope = self._kv_a_proj(x).split(parts, -1)
        latent = self._kv_a_layernorm(latent.contiguous())
        q_rope, k_rope = self._pairs(q_rope), self._pairs(k_rope.unsqueeze(1))
        q_rope, k_rope = self._ops.rotary(q_rope, k_rope, step.positions, step.rope_table)
        q = torch.cat((self._into_latent(q), q_rope), -1)
        k = torch.cat((latent.unsqueeze(1), k_rope), -1)
        out = step.attention.forward(q, k, k[..., :0], kv_cache, step.metadata, self._spec)
        return self._o_proj(self._out_of_latent(out).flatten(1))

    def _queries(self, x: Tensor) -> Tensor:
        if self._q_a_proj is not None and self._q_a_layernorm is not None:
            x = self._q_a_layernorm(self._q_a_proj(x))
        return self._q_proj(x).view(-1, self._sizes.num_heads, self._sizes.qk_head_dim)

    def _pairs(self, x: Tensor) -> Tensor:
        """Rotary pairs half a vector apart. Queries and keys alike, so products stay the same."""
        if not self._sizes.interleaved:
            return x.contiguous()
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

    def children(self) -> Mapping[str, Module]:
        """Under Hugging Face's names."""
        found: dict[str, Module] = {}
        if self._q_a_proj is not None and self._q_a_layernorm is not None:
            found = {"q_a_proj": self._q_a_proj, "q_a_layernorm": self._q_a_layernorm}
        return found | {
            self._q_name: self._q_proj,
            "kv_a_proj_with_mqa": self._kv_a_proj,
            "kv_a_layernorm": self._kv_a_layernorm,
            "o_proj": self._o_proj,
        }

    def own_parameters(self) -> Parameters:
        """`kv_b_proj.weight`, which is kept head by head, and perhaps scales of the latents."""
        sizes = self._sizes
        rows = sizes.num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        kept = None
        if self._ops.keep_linear is not None:
            kept = KeptForm(self._keep_kv_b, self._restore_kv_b)
        weight = Parameter((rows, sizes.kv_lora_rank), self._load_kv_b, kept=kept)
        at = self._context.at("kv_b_proj")
        spec = LinearSpec(at.name, at.ops, at.dtype, sizes.kv_lora_rank, (rows,), False)
        weight = read_as_floats(at.weights, spec, weight)
        return kv_scale_parameters(1, self._take_scale) | {"kv_b_proj.weight": weight}

    def _take_scale(self, i: int, scale: float) -> None:
        """Values are the beginning of the keys: they have no scale of their own."""
        if i == 0:
            self._spec = replace(self._spec, kv_scales=(scale, scale))

    def _keep_kv_b(self) -> list[Any]:
        return [self._into_latent.keep(), self._out_of_latent.keep()]

    def _restore_kv_b(self, kept: list[Any]) -> None:
        self._into_latent.restore(kept[0])
        self._out_of_latent.restore(kept[1])

    def _load_kv_b(self, weight: Tensor) -> None:
        sizes = self._sizes
        per_head = weight.view(sizes.num_heads, -1, sizes.kv_lora_rank)
        keys, values = per_head.split((sizes.qk_nope_head_dim, sizes.v_head_dim), 1)
        self._into_latent.load(keys.transpose(1, 2).contiguous())
        self._out_of_latent.load(values.contiguous())
