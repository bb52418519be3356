"""Cohere's Command R, R7B and A.

Rotary pairs are interleaved, and attention and MLP run side by side. R7B and A (`Cohere2`) have
windows in three of four layers; the fourth sees everything and has no positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from quire.config.shape import ModelShape
from quire.layers.rotary import Rope
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.decoder_style import FULL
from quire.models.shared_styles import windows_by_type


class CohereForCausalLM(DecoderForCausalLM):
    """Hugging Face's `CohereForCausalLM`."""

    TIED: ClassVar[bool] = True

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Logits are multiplied by `logit_scale`."""
        raw = shape.raw
        return DecoderStyle(
            norm="layer_no_bias",
            norm_eps=raw.get("rms_norm_eps", 1e-5),
            placement="parallel",
            qkv_bias=shape.attention_bias,
            out_bias=shape.attention_bias,
            qk_norm="per_head" if raw.get("use_qk_norm") else "",
            ropes={FULL: Rope.of(shape, interleaved=True)},
            logit_scale=raw.get("logit_scale", 0.0625),
        )


class Cohere2ForCausalLM(CohereForCausalLM):
    """Hugging Face's `Cohere2ForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Only layers with a window are rotated."""
        ropes = tuple(None if window is None else FULL for window in cls.windows(shape))
        return replace(super().style(shape), layer_ropes=ropes)

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """All layers but every fourth."""
        return windows_by_type(shape, period=shape.raw.get("sliding_window_pattern") or 4)
