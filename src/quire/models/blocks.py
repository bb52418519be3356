"""The decoder that families share: attention, gated MLP, layer, model, language-model head.

What a family does differently is declared in `DecoderStyle`; the blocks read that and the sizes,
never a family's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, KVCache
from quire.attention.metadata import AttentionMetadata
from quire.config.shape import LayerKV, ModelShape
from quire.errors import ModelLoadError
from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.dispatch import ops
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.parameter import Parameters, prefixed
from quire.layers.rotary import cos_sin_table
from quire.weights.names import GATE_UP, QKV, NameRules


@dataclass(frozen=True, slots=True)
class DecoderStyle:
    """What families do differently. A new family adds a field here, with the plain default."""

    qkv_bias: bool = False
    out_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    attention: Callable[[int], AttentionBlock] | None = None
    """Makes the attention of a layer, by its index, where it is not the usual one (MLA)."""
    mlp: Callable[[int], MLPBlock] | None = None
    """Makes what follows the attention in a layer, where it is not the usual one (MoE)."""


class AttentionBlock(Protocol):
    """What stands at the place of a layer's attention."""

    def __call__(self, x: Tensor, kv_cache: KVCache, step: StepInput) -> Tensor:
        """`[T, H] -> [T, H]`; stores this step's keys and values."""
        ...

    def parameters(self) -> Parameters:
        """Parameters under names relative to `self_attn`."""
        ...


class MLPBlock(Protocol):
    """What stands at the place of a layer's MLP."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, H] -> [T, H]`."""
        ...

    def parameters(self) -> Parameters:
        """Parameters under names relative to `mlp`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """What every layer of one forward pass reads."""

    positions: Tensor
    metadata: AttentionMetadata
    rope_table: Tensor
    attention: AttentionBackend


class Attention:
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: ModelShape, style: DecoderStyle) -> None:
        self._heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self._split = (q, kv, kv)
        self._spec = AttentionSpec(shape.head_dim**-0.5)
        self._qkv_proj = Linear(shape.hidden_size, self._split, style.qkv_bias)
        self._o_proj = Linear(q, shape.hidden_size, style.out_bias)

    def __call__(self, x: Tensor, kv_cache: KVCache, step: StepInput) -> Tensor:
        """`[T, H] -> [T, H]`; stores this step's keys and values."""
        heads, kv_heads, dim = self._heads
        q, k, v = self._qkv_proj(x).split(self._split, dim=-1)
        q, k, v = q.view(-1, heads, dim), k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
        q, k = ops.rotary(q, k, step.positions, step.rope_table)
        out = step.attention.forward(q, k, v, kv_cache, step.metadata, self._spec)
        return self._o_proj(out.view(-1, heads * dim))

    def parameters(self) -> Parameters:
        """`qkv_proj.*` and `o_proj.*`."""
        return prefixed("qkv_proj", self._qkv_proj.parameters()) | prefixed(
            "o_proj", self._o_proj.parameters()
        )


class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: ModelShape, style: DecoderStyle) -> None:
        size, inner = shape.hidden_size, shape.intermediate_size
        self._gate_up_proj = Linear(size, (inner, inner), style.mlp_bias)
        self._down_proj = Linear(inner, size, style.mlp_bias)

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, H] -> [T, H]`."""
        return self._down_proj(ops.silu_and_mul(self._gate_up_proj(x)))

    def parameters(self) -> Parameters:
        """`gate_up_proj.*` and `down_proj.*`."""
        return prefixed("gate_up_proj", self._gate_up_proj.parameters()) | prefixed(
            "down_proj", self._down_proj.parameters()
        )


class DecoderLayer:
    """Attention and MLP, each behind a norm, around a residual stream."""

    def __init__(self, shape: ModelShape, style: DecoderStyle, index: int) -> None:
        self._input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        make_attention, make_mlp = style.attention, style.mlp
        self._self_attn = make_attention(index) if make_attention else Attention(shape, style)
        self._post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self._mlp = make_mlp(index) if make_mlp else GatedMLP(shape, style)

    def __call__(
        self, x: Tensor, residual: Tensor | None, kv_cache: KVCache, step: StepInput
    ) -> tuple[Tensor, Tensor]:
        """`(x, residual)`, both `[T, H]`: their sum is the residual stream after this layer."""
        if residual is None:
            x, residual = self._input_layernorm(x), x
        else:
            x, residual = self._input_layernorm.add(x, residual)
        x = self._self_attn(x, kv_cache, step)
        x, residual = self._post_attention_layernorm.add(x, residual)
        return self._mlp(x), residual

    def parameters(self) -> Parameters:
        """All parameters of the layer under Hugging Face's names."""
        return (
            prefixed("input_layernorm", self._input_layernorm.parameters())
            | prefixed("self_attn", self._self_attn.parameters())
            | prefixed("post_attention_layernorm", self._post_attention_layernorm.parameters())
            | prefixed("mlp", self._mlp.parameters())
        )


class DecoderModel:
    """Embedding, layers, final norm."""

    def __init__(self, shape: ModelShape, style: DecoderStyle) -> None:
        self._embed_tokens = Embedding(shape.vocab_size, shape.hidden_size)
        self._layers = [DecoderLayer(shape, style, i) for i in range(shape.num_layers)]
        self._norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def __call__(self, input_ids: Tensor, kv_caches: Sequence[KVCache], step: StepInput) -> Tensor:
        """Ids `[T]` to hidden states `[T, H]`."""
        x, residual = self._embed_tokens(input_ids), None
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            x, residual = layer(x, residual, kv_cache, step)
        assert residual is not None, "a model has at least one layer"
        return self._norm.add(x, residual)[0]

    def parameters(self) -> Parameters:
        """All parameters under Hugging Face's names."""
        found = prefixed("embed_tokens", self._embed_tokens.parameters())
        for i, layer in enumerate(self._layers):
            found |= prefixed(f"layers.{i}", layer.parameters())
        return found | prefixed("norm", self._norm.parameters())


class DecoderForCausalLM:
    """Decoder and language-model head: a `CausalLM` once its parameters are loaded.

    A family sets `NAME_RULES` and `style`; see `quire.models.llama`.
    """

    NAME_RULES: ClassVar[NameRules] = NameRules(
        merges=(QKV, GATE_UP), ignore=(r".*\.rotary_emb\.inv_freq",)
    )

    @classmethod
    def kv_layers(cls, shape: ModelShape) -> tuple[LayerKV, ...]:
        """What each layer keeps of a token, known before weights are read."""
        return shape.uniform_kv_layers()

    @classmethod
    def attention_features(cls, shape: ModelShape) -> frozenset[str]:
        """What the family asks of attention, of `quire.attention.base.FEATURES`."""
        layers = cls.kv_layers(shape)
        found = {
            "window": any(layer.window is not None for layer in layers),
            "value_dim": any(layer.value_dim not in (0, layer.key_dim) for layer in layers),
            "latent": any(layer.value_dim == 0 for layer in layers),
        }
        return frozenset(name for name, needed in found.items() if needed)

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """The family's differences.

        Raises:
            ModelLoadError: the configuration asks for something the family does not have here.
        """
        raise NotImplementedError

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype, device: str, attention: AttentionBackend
    ) -> None:
        """Weights are loaded afterwards, through `parameters()`.

        Raises:
            ModelLoadError: the sizes contradict each other or ask for something unknown.
        """
        _check_sizes(shape)
        self.shape = shape
        self.dtype = dtype
        self.device = torch.device(device)
        self.num_parameters = 0
        self._attention = attention
        self._rope_table = cos_sin_table(shape, device)
        self._model = DecoderModel(shape, self.style(shape))
        self._lm_head = Linear(shape.hidden_size, shape.vocab_size, bias=False)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See `CausalLM.forward`."""
        step = StepInput(positions, metadata, self._rope_table, self._attention)
        return self._model(input_ids, kv_caches, step)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.compute_logits`."""
        return self._lm_head(hidden, torch.float32)

    def parameters(self) -> Parameters:
        """All parameters under Hugging Face's names; a tied head shares the embedding's."""
        found = prefixed("model", self._model.parameters())
        head = self._lm_head.parameters()["weight"]
        if not self.shape.tie_word_embeddings:
            return found | {"lm_head.weight": head}
        name = "model.embed_tokens.weight"
        return found | {name: found[name].also(head)}

    def name_rules(self) -> NameRules:
        """`NAME_RULES`, and that a tied head's copy in the checkpoint is skipped."""
        rules = self.NAME_RULES
        if not self.shape.tie_word_embeddings:
            return rules
        return replace(rules, ignore=(*rules.ignore, r"lm_head\.weight"))


def _check_sizes(shape: ModelShape) -> None:
    if shape.num_heads % shape.num_kv_heads:
        raise ModelLoadError(
            f"num_attention_heads must be a multiple of num_key_value_heads, got "
            f"{shape.num_heads} and {shape.num_kv_heads}"
        )
    if shape.hidden_act not in ("silu", "swish"):
        raise ModelLoadError(f"hidden_act must be silu, got {shape.hidden_act!r}")
