"""GLM-4 as Hugging Face has it: the first half of each head is rotated, in neighbouring pairs.

The later of the two classes (GLM-4-0414) also normalises the outputs of attention and MLP.
Checkpoints with the original names of entries and weights are read by `chatglm.py`.
"""

from __future__ import annotations

from typing import ClassVar

from quire.config.shape import ModelShape
from quire.layers.rotary import Rope
from quire.models.config_entries import number
from quire.models.decoder import DecoderForCausalLM
from quire.models.decoder_style import FULL, DecoderStyle
from quire.weights.names import GATE_UP, QKV, NameRules


class GlmForCausalLM(DecoderForCausalLM):
    """Hugging Face's `GlmForCausalLM`."""

    PLACEMENT: ClassVar[str] = "pre"

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Biases of queries, keys and values only."""
        nested = (shape.raw.get("rope_parameters") or {}).get("partial_rotary_factor") or 0.5
        part = number(shape, "partial_rotary_factor", nested)
        return DecoderStyle(
            placement=cls.PLACEMENT,
            qkv_bias=shape.attention_bias,
            ropes={FULL: Rope.of(shape, dim=int(shape.head_dim * part), interleaved=True)},
        )


class Glm4ForCausalLM(GlmForCausalLM):
    """Hugging Face's `Glm4ForCausalLM`."""

    PLACEMENT: ClassVar[str] = "sandwich"
    NAME_RULES: ClassVar[NameRules] = NameRules(
        merges=(QKV, GATE_UP),
        substitutions=(
            (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
            (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
            (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
        ),
        ignore=(r".*\.rotary_emb\.inv_freq",),
    )
