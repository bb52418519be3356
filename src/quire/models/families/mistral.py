"""Mistral: Llama with a sliding window in every layer (none in later models)."""

from __future__ import annotations

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.shared_styles import llama_style, mistral_windows


class MistralForCausalLM(DecoderForCausalLM):
    """Hugging Face's `MistralForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Llama's."""
        return llama_style(shape)

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """`sliding_window`, unless `layer_types` names the layers that have it."""
        return mistral_windows(shape)
