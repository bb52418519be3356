"""Gemma 1, 2 and 3 (text): scaled embeddings, norms of weight 1 + w, tanh-GELU gates.

Gemma 2 adds norms after attention and MLP, soft-caps and windows in every second layer; Gemma 3
norms on queries and keys, and rotary positions of their own for the layers with windows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.layers.rotary import Rope
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.decoder_style import FULL
from quire.models.shared_styles import windows_by_type
from quire.weights.names import GATE_UP, QKV, NameRules


class GemmaForCausalLM(DecoderForCausalLM):
    """Hugging Face's `GemmaForCausalLM`."""

    TIED: ClassVar[bool] = True

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Where a configuration says "gelu" the models were trained with its tanh form."""
        if shape.raw.get("use_bidirectional_attention"):
            raise ModelLoadError("Gemma with bidirectional attention cannot generate text")
        act = shape.raw.get("hidden_activation") or shape.raw.get("hidden_act") or "gelu"
        return DecoderStyle(
            norm="rms_unit",
            qkv_bias=shape.attention_bias,
            out_bias=shape.attention_bias,
            activation="gelu_pytorch_tanh" if act == "gelu" else act,
            embedding_scale=shape.hidden_size**0.5,
        )


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Hugging Face's `Gemma2ForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Scores are scaled by `query_pre_attn_scalar`, not by the size of a head."""
        raw = shape.raw
        return replace(
            super().style(shape),
            placement="sandwich",
            attention_scale=raw.get("query_pre_attn_scalar", 256) ** -0.5,
            attention_softcap=raw.get("attn_logit_softcapping", 50.0) or 0.0,
            logit_softcap=raw.get("final_logit_softcapping", 30.0) or 0.0,
        )

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """The first, third, fifth … layer."""
        return windows_by_type(shape, period=2)


class Gemma3ForCausalLM(GemmaForCausalLM):
    """Hugging Face's `Gemma3ForCausalLM`; of `Gemma3ForConditionalGeneration` the text model."""

    NAME_RULES: ClassVar[NameRules] = NameRules(
        merges=(QKV, GATE_UP),
        renames=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        ignore=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
    )

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Layers with windows have a base of their own and no scaling."""
        raw = shape.raw
        ropes = raw.get("rope_parameters") or {}
        full, local = ropes.get("full_attention") or {}, ropes.get("sliding_attention") or {}
        theta = raw.get("rope_theta") or full.get("rope_theta") or 1e6
        near = raw.get("rope_local_base_freq") or local.get("rope_theta") or 1e4
        return replace(
            super().style(shape),
            placement="sandwich",
            qk_norm="head",
            attention_scale=raw.get("query_pre_attn_scalar", 256) ** -0.5,
            attention_softcap=raw.get("attn_logit_softcapping") or 0.0,
            logit_softcap=raw.get("final_logit_softcapping") or 0.0,
            ropes={
                FULL: Rope.of(shape, theta=theta),
                "sliding": Rope.of(shape, theta=near, scaling=_own_scaling(local)),
            },
            layer_ropes=tuple(FULL if w is None else "sliding" for w in cls.windows(shape)),
        )

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """All layers but every sixth."""
        return windows_by_type(shape, period=shape.raw.get("sliding_window_pattern") or 6)


def _own_scaling(parameters: dict[str, Any]) -> dict[str, Any]:
    return parameters if parameters.get("rope_type", "default") != "default" else {}
