"""GPT-2: layer norms, learned positions, a plain MLP, weights stored as `[in, out]`."""

from __future__ import annotations

from typing import ClassVar

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.shared_styles import GPT2_NAMES
from quire.weights.names import Layout, NameRules, transposed


class GPT2LMHeadModel(DecoderForCausalLM):
    """Hugging Face's `GPT2LMHeadModel`; checkpoints may lack the prefix `transformer.`."""

    TIED: ClassVar[bool] = True
    NAME_RULES: ClassVar[NameRules] = NameRules(
        substitutions=GPT2_NAMES,
        layouts=(Layout(r"model\.layers\..*_proj\.weight", transposed),),
        ignore=(r".*\.attn\.(masked_)?bias",),
    )

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Scores may be left unscaled or be scaled by layer."""
        raw = shape.raw
        return DecoderStyle(
            norm="layer",
            norm_eps=raw.get("rms_norm_eps", 1e-5),
            qkv_bias=True,
            out_bias=True,
            attention_scale=None if raw.get("scale_attn_weights", True) else 1.0,
            scale_by_layer=bool(raw.get("scale_attn_by_inverse_layer_idx")),
            ropes={},
            learned_positions=shape.max_position_embeddings,
            gated=False,
            activation=raw.get("hidden_act", "gelu_new"),
            mlp_bias=True,
        )
