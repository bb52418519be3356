"""GPT-OSS: attention sinks, a window in every other layer, mixtures with a clamped activation.

Checkpoints keep the weights of all experts in one tensor, transposed, with columns of gate and up
alternating. Those in MXFP4 are blocks and scales, `[E, N, …]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from quire.config.shape import ModelShape
from quire.kernels.dispatch import Ops
from quire.models.config_entries import number
from quire.models.decoder import DecoderForCausalLM
from quire.models.decoder_style import DecoderStyle
from quire.models.mixture import mixture, routing
from quire.models.shared_styles import windows_by_type
from quire.weights.names import (
    GATE_UP,
    MLX_EXPERT_STACKS,
    QKV,
    NameRules,
    Stack,
    transposed,
    transposed_uninterleaved,
    uninterleaved,
)


class GptOssForCausalLM(DecoderForCausalLM):
    """Hugging Face's `GptOssForCausalLM`."""

    NAME_RULES: ClassVar[NameRules] = NameRules(
        merges=(QKV, GATE_UP),
        substitutions=((r"\.mlp\.router\.", ".mlp.gate."),),
        stacks=(
            Stack(
                "experts.gate_up_proj", "experts.{}.gate_up_proj.weight", transposed_uninterleaved
            ),
            Stack("experts.gate_up_proj_bias", "experts.{}.gate_up_proj.bias", uninterleaved, (2,)),
            Stack("experts.down_proj", "experts.{}.down_proj.weight", transposed),
            Stack(
                "experts.gate_up_proj_blocks", "experts.{}.gate_up_proj.blocks", uninterleaved, (4,)
            ),
            Stack("experts.gate_up_proj_scales", "experts.{}.gate_up_proj.scales", uninterleaved),
            Stack("experts.down_proj_blocks", "experts.{}.down_proj.blocks", None, (4,)),
            Stack("experts.down_proj_scales", "experts.{}.down_proj.scales"),
            Stack("experts.down_proj_bias", "experts.{}.down_proj.bias", None, (2,)),
            *MLX_EXPERT_STACKS,
        ),
        ignore=(r".*\.rotary_emb\.inv_freq",),
    )

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """In every second layer, the first included, unless `layer_types` says otherwise."""
        return windows_by_type(shape, period=2)

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Every layer has a mixture; the softmax is over the chosen experts only."""
        alpha = number(shape, "swiglu_alpha", 1.702)
        limit = number(shape, "swiglu_limit", 7.0)

        def activate(ops: Ops) -> Callable[[Tensor], Tensor]:
            return lambda x: ops.clamped_swiglu(x, alpha, limit)

        mlp = mixture(
            shape,
            routing(shape, normalise=True),
            shape.intermediate_size,
            expert_bias=True,
            router_bias=True,
            activate=activate,
        )
        bias = bool(shape.raw.get("attention_bias", True))
        return DecoderStyle(
            norm="rms_wide",
            qkv_bias=bias,
            out_bias=bias,
            sinks=True,
            mlp=mlp,
        )
