"""ChatGLM2, ChatGLM3 and GLM-4, with the names of entries and weights that their own code uses.

The first half of each head is rotated, in neighbouring pairs. Queries, keys and values are one
weight; gate and up are another.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.layers.rotary import Rope
from quire.models.config_entries import number
from quire.models.decoder import DecoderForCausalLM
from quire.models.decoder_style import FULL, DecoderStyle
from quire.weights.names import Layout, NameRules, grouped_qkv


class ChatGLMForConditionalGeneration(DecoderForCausalLM):
    """The class of the checkpoints' own code; their `config.json` may also say `ChatGLMModel`."""

    NAME_RULES: ClassVar[NameRules] = NameRules(
        renames=(
            ("transformer.embedding.word_embeddings.", "model.embed_tokens."),
            ("transformer.encoder.final_layernorm.", "model.norm."),
            ("transformer.encoder.layers.", "model.layers."),
            ("transformer.output_layer.", "lm_head."),
        ),
        substitutions=(
            (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
            (r"\.mlp\.dense_h_to_4h\.", ".mlp.gate_up_proj."),
            (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
        ),
        ignore=(r"transformer\.rotary_pos_emb\.inv_freq",),
    )

    @classmethod
    def rules(cls, shape: ModelShape) -> NameRules:
        """Without grouped queries, rows are ordered by head: its query, its key, its value."""
        if shape.raw.get("multi_query_attention", False):
            return cls.NAME_RULES
        layout = Layout(r".*\.self_attn\.qkv_proj\..*", grouped_qkv(shape.num_heads, 1))
        return dataclasses.replace(cls.NAME_RULES, layouts=(layout,))

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Reads the entries that only this family has.

        Raises:
            ModelLoadError: the first ChatGLM, or an option that no released model uses.
        """
        raw = shape.raw
        if raw.get("position_encoding_2d") is not None:
            raise ModelLoadError(
                "ChatGLM-6B of the first generation (two-dimensional positions) is not "
                "supported: use ChatGLM2, ChatGLM3 or GLM-4"
            )
        if raw.get("fp32_residual_connection"):
            raise ModelLoadError("fp32_residual_connection must be false, got true")
        if raw.get("pre_seq_len"):
            raise ModelLoadError(
                f"pre_seq_len (a tuned prefix) must be null, got {raw['pre_seq_len']}"
            )
        every = bool(raw.get("add_bias_linear", False))
        # The longer contexts of this family come from a larger base.
        theta = 10000.0 * number(shape, "rope_ratio", 1.0)
        rope = Rope.of(shape, dim=shape.head_dim // 2, theta=theta, interleaved=True)
        return DecoderStyle(
            norm="rms_wide" if raw.get("rmsnorm", True) else "layer",
            residual_is_normed=bool(raw.get("apply_residual_connection_post_layernorm", False)),
            final_norm=bool(raw.get("post_layer_norm", True)),
            qkv_bias=every or bool(raw.get("add_qkv_bias", False)),
            out_bias=every,
            mlp_bias=every,
            activation="silu",
            ropes={FULL: rope},
        )
