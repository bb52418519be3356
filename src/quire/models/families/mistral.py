"""Mistral: Llama with a sliding window in every layer (none in later models)."""

from __future__ import annotations

from quire.config.shape import ModelShape
from quire.models.decoder import windows_by_type
from quire.models.families.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Hugging Face's `MistralForCausalLM`."""

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """`sliding_window`, unless `layer_types` names the layers that have it."""
        if shape.raw.get("layer_types"):
            return windows_by_type(shape)
        return (shape.raw.get("sliding_window"),) * shape.num_layers
