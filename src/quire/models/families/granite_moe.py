"""Granite MoE: Granite whose MLP is a mixture; the softmax is over the chosen experts only.

Checkpoints keep all experts' weights in one tensor, under names of their own.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM
from quire.models.decoder_style import DecoderStyle
from quire.models.mixture import mixture, routing
from quire.models.shared_styles import granite_style
from quire.weights.names import EXPERT_STACKS, GATE_UP, QKV, NameRules


class GraniteMoeForCausalLM(DecoderForCausalLM):
    """Hugging Face's `GraniteMoeForCausalLM`."""

    NAME_RULES: ClassVar[NameRules] = NameRules(
        merges=(QKV, GATE_UP),
        substitutions=(
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"\.mlp\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
            (r"\.mlp\.output_linear\.weight$", ".mlp.experts.down_proj"),
            (r"\.mlp\.router\.(layer\.)?weight$", ".mlp.gate.weight"),
        ),
        stacks=EXPERT_STACKS,
        ignore=(r".*\.rotary_emb\.inv_freq",),
    )

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Every layer has a mixture."""
        mlp = mixture(shape, routing(shape, normalise=True), shape.intermediate_size)
        return dataclasses.replace(granite_style(shape), mlp=mlp)
