"""OLMo 2: norms on the outputs of attention and MLP, and on queries and keys over all heads."""

from __future__ import annotations

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM, DecoderStyle


class Olmo2ForCausalLM(DecoderForCausalLM):
    """Hugging Face's `Olmo2ForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """`attention_bias` covers all four projections."""
        return DecoderStyle(
            norm="rms_wide",
            norm_eps=shape.raw.get("rms_norm_eps", 1e-5),
            placement="post",
            qkv_bias=shape.attention_bias,
            out_bias=shape.attention_bias,
            qk_norm="full",
        )
