"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 whose MLP is a mixture in all or some layers."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from quire.config.shape import ModelShape
from quire.kernels.moe import Routing
from quire.models.config_entries import integers, whole
from quire.models.decoder import DecoderForCausalLM
from quire.models.decoder_style import DecoderStyle
from quire.models.mixture import mixture, routing
from quire.models.shared_styles import EXPERT_RULES, qwen3_style, qwen_windows
from quire.weights.names import NameRules


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    """Hugging Face's `Qwen2MoeForCausalLM`: beside the routed experts a gated shared one."""

    NAME_RULES: ClassVar[NameRules] = EXPERT_RULES

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """A mixture in every `decoder_sparse_step`-th layer but `mlp_only_layers`."""
        mlp = mixture(
            shape,
            _routing(shape),
            whole(shape, "moe_intermediate_size"),
            _dense(shape),
            shared_size=whole(shape, "shared_expert_intermediate_size"),
            shared_gate=True,
        )
        return DecoderStyle(qkv_bias=bool(shape.raw.get("qkv_bias", True)), mlp=mlp)

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """Only if the configuration uses them."""
        return qwen_windows(shape)


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Hugging Face's `Qwen3MoeForCausalLM`."""

    NAME_RULES: ClassVar[NameRules] = EXPERT_RULES

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """A mixture in every `decoder_sparse_step`-th layer but `mlp_only_layers`."""
        size = whole(shape, "moe_intermediate_size")
        mlp = mixture(shape, _routing(shape), size, _dense(shape))
        return dataclasses.replace(qwen3_style(shape), mlp=mlp)

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """Only if the configuration uses them."""
        return qwen_windows(shape)


def _routing(shape: ModelShape) -> Routing:
    return routing(shape, normalise=bool(shape.raw.get("norm_topk_prob", False)))


def _dense(shape: ModelShape) -> frozenset[int]:
    step = whole(shape, "decoder_sparse_step", 1)
    between = (layer for layer in range(shape.num_layers) if (layer + 1) % step)
    return frozenset(integers(shape, "mlp_only_layers")).union(between)
