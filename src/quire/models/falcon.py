"""Falcon: 7b (one KV head, attention and MLP side by side), the new decoder architecture of 40b,
180b and 11b (KV groups, a norm for each), and the ALiBi models (Falcon-RW)."""

from __future__ import annotations

from typing import ClassVar

from quire.config.shape import ModelShape
from quire.models.blocks import DecoderForCausalLM, DecoderStyle
from quire.weights.names import Layout, NameRules, grouped_qkv


class FalconForCausalLM(DecoderForCausalLM):
    """Hugging Face's `FalconForCausalLM`."""

    TIED: ClassVar[bool] = True

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """ALiBi is added before scores are scaled, so its slopes are scaled here."""
        raw = shape.raw
        bias, alibi = bool(raw.get("bias")), bool(raw.get("alibi"))
        return DecoderStyle(
            norm="layer",
            norm_eps=raw.get("rms_norm_eps", 1e-5),
            placement=_placement(shape),
            qkv_bias=bias,
            out_bias=bias,
            alibi=shape.head_dim**-0.5 if alibi else 0.0,
            ropes={} if alibi else None,
            gated=False,
            activation=raw.get("hidden_act", "gelu"),
            mlp_bias=bias,
        )

    @classmethod
    def rules(cls, shape: ModelShape) -> NameRules:
        """The query heads of a KV head, its key and its value stand together."""
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
