"""Qwen2, Qwen2.5 (biases on q, k, v) and Qwen3 (norms on the heads of q and k)."""

from __future__ import annotations

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.shared_styles import qwen3_style, qwen_windows


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Hugging Face's `Qwen2ForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """The output projection has no bias."""
        return DecoderStyle(qkv_bias=True)

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """Only if the configuration uses them."""
        return qwen_windows(shape)


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Hugging Face's `Qwen3ForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Norms on the heads of queries and keys."""
        return qwen3_style(shape)

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """Only if the configuration uses them."""
        return qwen_windows(shape)
