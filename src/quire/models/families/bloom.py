"""BLOOM: ALiBi instead of positions, a norm on the embedding, fused q, k, v."""

from __future__ import annotations

from typing import ClassVar

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.weights.names import Layout, NameRules, grouped_qkv


class BloomForCausalLM(DecoderForCausalLM):
    """Hugging Face's `BloomForCausalLM`; checkpoints may lack the prefix `transformer.`."""

    TIED: ClassVar[bool] = True

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """`apply_residual_connection_post_layernorm`: the stream is what the norms give."""
        return DecoderStyle(
            norm="layer",
            norm_eps=shape.raw.get("rms_norm_eps", 1e-5),
            residual_is_normed=bool(shape.raw.get("apply_residual_connection_post_layernorm")),
            qkv_bias=True,
            out_bias=True,
            alibi=1.0,
            ropes={},
            gated=False,
            activation="gelu_new",
            mlp_bias=True,
            embedding_norm=True,
        )

    @classmethod
    def rules(cls, shape: ModelShape) -> NameRules:
        """Rows are ordered by head: its query, its key, its value."""
        return NameRules(
            substitutions=(
                (r"^(transformer\.)?word_embeddings\.", "model.embed_tokens."),
                (r"^(transformer\.)?word_embeddings_layernorm\.", "model.embed_norm."),
                (r"^(transformer\.)?ln_f\.", "model.norm."),
                (r"^(transformer\.)?h\.", "model.layers."),
                (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
                (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
                (r"\.dense_h_to_4h\.", ".up_proj."),
                (r"\.dense_4h_to_h\.", ".down_proj."),
            ),
            layouts=(Layout(r".*\.qkv_proj\..*", grouped_qkv(shape.num_heads, 1)),),
        )
