"""SmolLM3: Llama without positions in every fourth layer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.decoder_style import FULL
from quire.models.shared_styles import llama_style, windows_by_type


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """Hugging Face's `SmolLM3ForCausalLM`."""

    TIED: ClassVar[bool] = True

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """`no_rope_layers` holds 1 for each layer that is rotated, despite its name."""
        raw, count = shape.raw, shape.num_layers
        rotated = raw.get("no_rope_layers")
        if rotated is None:
            interval = raw.get("no_rope_layer_interval", 4)
            rotated = [(i + 1) % interval != 0 for i in range(count)]
        if len(rotated) != count:
            raise ModelLoadError(f"no_rope_layers must have {count} entries, got {len(rotated)}")
        ropes = tuple(FULL if yes else None for yes in rotated)
        return replace(llama_style(shape), layer_ropes=ropes)

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """None, unless `use_sliding_window`."""
        if not shape.raw.get("use_sliding_window"):
            return (None,) * shape.num_layers
        return windows_by_type(shape)
