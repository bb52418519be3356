"""OLMoE: a mixture in every layer; norms on queries and keys over all heads together."""

from __future__ import annotations

from typing import ClassVar

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.models.decoder import DecoderForCausalLM
from quire.models.decoder_style import DecoderStyle
from quire.models.mixture import mixture, routing
from quire.models.shared_styles import EXPERT_RULES
from quire.weights.names import NameRules


class OlmoeForCausalLM(DecoderForCausalLM):
    """Hugging Face's `OlmoeForCausalLM`."""

    NAME_RULES: ClassVar[NameRules] = EXPERT_RULES

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """`attention_bias` covers all four projections.

        Raises:
            ModelLoadError: `clip_qkv` is set, which no released model does.
        """
        if shape.raw.get("clip_qkv") is not None:
            raise ModelLoadError(f"clip_qkv must be null, got {shape.raw['clip_qkv']!r:.60}")
        choice = routing(shape, normalise=bool(shape.raw.get("norm_topk_prob", False)))
        return DecoderStyle(
            qkv_bias=shape.attention_bias,
            out_bias=shape.attention_bias,
            qk_norm="full",
            mlp=mixture(shape, choice, shape.intermediate_size),
        )
