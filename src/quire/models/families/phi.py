"""Phi 1, 1.5 and 2, and Phi-3, Phi-3.5 and Phi-4.

The first three have attention and MLP side by side behind one norm; the others are Llamas with
merged weights and, for long contexts, LongRoPE.
"""

from __future__ import annotations

from typing import ClassVar

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.shared_styles import part_rope, same_windows
from quire.weights.names import QKV, NameRules


class PhiForCausalLM(DecoderForCausalLM):
    """Hugging Face's `PhiForCausalLM`."""

    NAME_RULES: ClassVar[NameRules] = NameRules(
        merges=(QKV,),
        substitutions=(
            (r"^model\.final_layernorm\.", "model.norm."),
            (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            (r"\.(q|k)_layernorm\.", r".\1_norm."),
            (r"\.fc1\.", ".up_proj."),
            (r"\.fc2\.", ".down_proj."),
        ),
        ignore=(r".*\.rotary_emb\.inv_freq",),
    )

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Half of each head is rotated unless the configuration says otherwise."""
        raw = shape.raw
        return DecoderStyle(
            norm="layer",
            norm_eps=raw.get("rms_norm_eps", 1e-5),
            placement="parallel",
            qkv_bias=True,
            out_bias=True,
            qk_norm="head" if raw.get("qk_layernorm") else "",
            ropes=part_rope(shape, 0.5),
            gated=False,
            activation=raw.get("hidden_act", "gelu_new"),
            mlp_bias=True,
            head_bias=True,
        )


class Phi3ForCausalLM(DecoderForCausalLM):
    """Hugging Face's `Phi3ForCausalLM`."""

    NAME_RULES: ClassVar[NameRules] = NameRules(ignore=(r".*\.rotary_emb\.inv_freq",))

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Llama's; what differs are names and rotary scaling."""
        return DecoderStyle(norm_eps=shape.raw.get("rms_norm_eps", 1e-5))

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """`sliding_window` in every layer."""
        return same_windows(shape)
