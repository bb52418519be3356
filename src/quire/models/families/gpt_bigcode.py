"""GPT-BigCode (SantaCoder, StarCoder 1): GPT-2 whose query heads mostly share a key/value head."""

from __future__ import annotations

from typing import ClassVar

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.shared_styles import GPT2_NAMES
from quire.weights.names import Layout, NameRules, grouped_qkv


class GPTBigCodeForCausalLM(DecoderForCausalLM):
    """Hugging Face's `GPTBigCodeForCausalLM`; checkpoints may lack the prefix `transformer.`."""

    TIED: ClassVar[bool] = True

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Softmax is always in float32, whatever `attention_softmax_in_fp32` says.

        Raises:
            ModelLoadError: the model is the decoder of an encoder.
        """
        raw = shape.raw
        if raw.get("add_cross_attention"):
            raise ModelLoadError("config.json: add_cross_attention must be false, got true")
        return DecoderStyle(
            norm="layer",
            norm_eps=raw.get("rms_norm_eps", 1e-5),
            qkv_bias=True,
            out_bias=True,
            attention_scale=None if raw.get("scale_attn_weights", True) else 1.0,
            ropes={},
            learned_positions=shape.max_position_embeddings,
            gated=False,
            activation=raw.get("hidden_act", "gelu_pytorch_tanh"),
            mlp_bias=True,
        )

    @classmethod
    def rules(cls, shape: ModelShape) -> NameRules:
        """Rows are all queries, then the one key and the one value. Without `multi_query` they are
        ordered by head: its query, its key, its value."""
        by_head = Layout(r".*\.qkv_proj\..*", grouped_qkv(shape.num_heads, 1))
        return NameRules(
            substitutions=GPT2_NAMES,
            layouts=() if shape.raw.get("multi_query", True) else (by_head,),
            ignore=(r".*\.attn\.(masked_)?bias",),
        )
