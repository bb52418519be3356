"""Llama 1, 2, 3, 3.1, 3.2 and models of their shape (SmolLM, Yi, TinyLlama, quire-demo).

The family as its differences over `blocks.py`: biases as the configuration says; tied or separate
head; all rotary scalings.
"""

from __future__ import annotations

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.models.decoder import DecoderForCausalLM, DecoderStyle


class LlamaForCausalLM(DecoderForCausalLM):
    """Hugging Face's `LlamaForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """`attention_bias` covers all four projections of the attention in this family."""
        partial = shape.raw.get("partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise ModelLoadError(f"partial_rotary_factor must be 1 for Llama, got {partial!r}")
        return DecoderStyle(
            qkv_bias=shape.attention_bias,
            out_bias=shape.attention_bias,
            mlp_bias=shape.mlp_bias,
        )
