"""StarCoder2: layer norms, biases and a plain MLP around grouped-query attention with windows."""

from __future__ import annotations

from typing import ClassVar

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.shared_styles import same_windows
from quire.weights.names import QKV, NameRules


class Starcoder2ForCausalLM(DecoderForCausalLM):
    """Hugging Face's `Starcoder2ForCausalLM`."""

    TIED: ClassVar[bool] = True
    NAME_RULES: ClassVar[NameRules] = NameRules(
        merges=(QKV,),
        substitutions=(
            (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
            (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
        ),
        ignore=(r".*\.rotary_emb\.inv_freq",),
    )

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """`use_bias` covers all linear layers."""
        raw = shape.raw
        bias = bool(raw.get("use_bias", True))
        return DecoderStyle(
            norm="layer",
            norm_eps=raw.get("rms_norm_eps", 1e-5),
            qkv_bias=bias,
            out_bias=bias,
            gated=False,
            activation=raw.get("hidden_act", "gelu_pytorch_tanh"),
            mlp_bias=bias,
        )

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """`sliding_window` in every layer."""
        return same_windows(shape)
