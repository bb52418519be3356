"""Granite 3: Llama with multipliers on embedding, residual, scores and logits."""

from __future__ import annotations

from dataclasses import replace

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderStyle
from quire.models.families.llama import LlamaForCausalLM


class GraniteForCausalLM(LlamaForCausalLM):
    """Hugging Face's `GraniteForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Logits are divided by `logits_scaling`."""
        raw = shape.raw
        return replace(
            super().style(shape),
            embedding_scale=raw.get("embedding_multiplier", 1.0),
            residual_scale=raw.get("residual_multiplier", 1.0),
            attention_scale=raw.get("attention_multiplier", 1.0),
            logit_scale=1.0 / raw.get("logits_scaling", 1.0),
        )
