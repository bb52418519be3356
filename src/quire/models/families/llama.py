"""Llama 1, 2, 3, 3.1, 3.2 and models of their shape (SmolLM, Yi, TinyLlama, quire-demo).

Biases as the configuration says; tied or separate head; all rotary scalings.
"""

from __future__ import annotations

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.shared_styles import llama_style


class LlamaForCausalLM(DecoderForCausalLM):
    """Hugging Face's `LlamaForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """The plain style, with biases as the configuration says."""
        return llama_style(shape)
