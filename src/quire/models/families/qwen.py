"""Qwen2, Qwen2.5 (biases on q, k, v) and Qwen3 (norms on the heads of q and k)."""

from __future__ import annotations

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM, DecoderStyle, windows_by_type


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Hugging Face's `Qwen2ForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """The output projection has no bias."""
        return DecoderStyle(qkv_bias=True)

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """Windows, if at all, from layer `max_window_layers` on."""
        raw = shape.raw
        if not raw.get("use_sliding_window") or raw.get("sliding_window") is None:
            return (None,) * shape.num_layers
        if raw.get("layer_types"):
            return windows_by_type(shape)
        full = min(raw.get("max_window_layers", shape.num_layers), shape.num_layers)
        return (None,) * full + (raw["sliding_window"],) * (shape.num_layers - full)


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Hugging Face's `Qwen3ForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """`attention_bias` covers all four projections."""
        bias = shape.attention_bias
        return DecoderStyle(qkv_bias=bias, out_bias=bias, qk_norm="head")
