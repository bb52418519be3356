"""OPT: learned positions, the first in row 2 of their table; ReLU; norms before each block.

The 350m model has its norms after the sums instead, and a narrower embedding that is projected in
and out.
"""

from __future__ import annotations

from typing import ClassVar

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.weights.names import QKV, NameRules

_OFFSET = 2
"""Rows of the position table before position 0."""


class OPTForCausalLM(DecoderForCausalLM):
    """Hugging Face's `OPTForCausalLM`."""

    TIED: ClassVar[bool] = True
    NAME_RULES: ClassVar[NameRules] = NameRules(
        merges=(QKV,),
        substitutions=(
            (r"^(model\.)?decoder\.", "model."),
            (r"^model\.final_layer_norm\.", "model.norm."),
            (r"\.self_attn_layer_norm\.", ".input_layernorm."),
            (r"\.final_layer_norm\.", ".post_attention_layernorm."),
            (r"\.out_proj\.", ".o_proj."),
            (r"\.fc1\.", ".mlp.up_proj."),
            (r"\.fc2\.", ".mlp.down_proj."),
        ),
        ignore=(r"model\.version",),
    )

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """A norm at the end only if norms come first."""
        raw = shape.raw
        before, bias = raw.get("do_layer_norm_before", True), bool(raw.get("enable_bias", True))
        affine = raw.get("layer_norm_elementwise_affine", True)
        return DecoderStyle(
            norm="layer" if affine else "layer_bare",
            norm_eps=1e-5,
            placement="pre" if before else "after",
            final_norm=bool(before and not raw.get("_remove_final_layer_norm")),
            qkv_bias=bias,
            out_bias=bias,
            ropes={},
            learned_positions=shape.max_position_embeddings + _OFFSET,
            position_offset=_OFFSET,
            gated=False,
            activation=raw.get("hidden_act", "relu"),
            mlp_bias=bias,
            embedding_size=raw.get("word_embed_proj_dim"),
        )
