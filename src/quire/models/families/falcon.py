"""Falcon in its three forms.

7b has one KV head, and attention and MLP side by side. 40b, 180b and 11b (the "new decoder
architecture") have KV groups, and a norm each for attention and MLP. Falcon-RW has ALiBi.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from quire.config.shape import LayerKV, ModelShape
from quire.kernels.decoder import AttentionParts
from quire.layers.alibi import RoundedBiases
from quire.layers.context import LayerContext
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.decoder_style import StepInput
from quire.models.sublayers import Attention
from quire.weights.names import Layout, NameRules, grouped_qkv


class FalconForCausalLM(DecoderForCausalLM):
    """Hugging Face's `FalconForCausalLM`, in older configurations `RWForCausalLM`."""

    TIED: ClassVar[bool] = True

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Models with ALiBi get it from `BiasedAttention`."""
        raw = shape.raw
        bias, alibi = bool(raw.get("bias")), bool(raw.get("alibi"))
        style = DecoderStyle(
            norm="layer",
            norm_eps=raw.get("rms_norm_eps", 1e-5),
            placement=_placement(shape),
            qkv_bias=bias,
            out_bias=bias,
            ropes={} if alibi else None,
            gated=False,
            activation=raw.get("hidden_act", "gelu"),
            mlp_bias=bias,
        )
        if not alibi:
            return style
        return replace(
            style,
            attention=lambda context, i: BiasedAttention(context, shape, style.settled(shape), i),
        )

    @classmethod
    def kv_layers(cls, shape: ModelShape) -> tuple[LayerKV, ...]:
        """With ALiBi, keys are wider: they carry their biases."""
        layers = super().kv_layers(shape)
        if not shape.raw.get("alibi"):
            return layers
        more = _biases(shape).width
        return tuple(replace(layer, key_dim=layer.key_dim + more) for layer in layers)

    @classmethod
    def rules(cls, shape: ModelShape) -> NameRules:
        """Rows are ordered by KV head: its query heads, its key, its value."""
        group = shape.num_heads // shape.num_kv_heads
        return NameRules(
            substitutions=(
                (r"^transformer\.word_embeddings\.", "model.embed_tokens."),
                (r"^transformer\.ln_f\.", "model.norm."),
                (r"^transformer\.h\.", "model.layers."),
                (r"\.ln_attn\.", ".input_layernorm."),
                (r"\.ln_mlp\.", ".post_attention_layernorm."),
                (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
                (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
                (r"\.dense_h_to_4h\.", ".up_proj."),
                (r"\.dense_4h_to_h\.", ".down_proj."),
            ),
            layouts=(Layout(r".*\.qkv_proj\..*", grouped_qkv(shape.num_kv_heads, group)),),
            ignore=(r".*\.rotary_emb\.inv_freq", r".*\.self_attention\.rotary\.inv_freq"),
        )


def _placement(shape: ModelShape) -> str:
    raw = shape.raw
    if not raw.get("parallel_attn", True):
        return "pre"
    if not raw.get("new_decoder_architecture"):
        return "parallel"
    return "parallel_two" if (raw.get("num_ln_in_parallel_attn") or 2) == 2 else "parallel"


class BiasedAttention(Attention):
    """Attention with biases that are bfloat16 numbers of their keys' positions.

    The models were trained with biases rounded like this. A rounded bias is no longer a slope times
    a distance, so it cannot be computed from two positions: it is stored with the key, and scaled
    with the scores.
    """

    def __init__(
        self, context: LayerContext, shape: ModelShape, style: DecoderStyle, index: int
    ) -> None:
        dim = shape.head_dim
        super().__init__(context, shape, style, index, LayerKV(shape.num_kv_heads, dim, dim))
        self._biases = _biases(shape)

    def fused(self, step: StepInput) -> AttentionParts | None:
        """None: fused layers have no operation for the biases."""
        return None

    def _rotated(self, q: Tensor, k: Tensor, step: StepInput) -> tuple[Tensor, Tensor]:
        return self._biases.queries(q), self._biases.keys(k, step.positions)


def _biases(shape: ModelShape) -> RoundedBiases:
    return RoundedBiases(shape.num_heads, shape.num_kv_heads)
