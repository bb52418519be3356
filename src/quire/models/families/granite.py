"""Granite 3: Llama with multipliers on embedding, residual, scores and logits."""

from __future__ import annotations

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.shared_styles import granite_style


class GraniteForCausalLM(DecoderForCausalLM):
    """Hugging Face's `GraniteForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Llama's with multipliers."""
        return granite_style(shape)
