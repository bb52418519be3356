"""GLM-4.5 and 4.6: grouped-query attention, DeepSeek-V3's routing, a shared expert.

The first half of each head is rotated, in pairs of one dimension from each of its two quarters.
"""

from __future__ import annotations

from typing import ClassVar

from quire.config.shape import ModelShape
from quire.layers.rotary import Rope
from quire.models.config_entries import whole
from quire.models.decoder import DecoderForCausalLM
from quire.models.decoder_style import FULL, DecoderStyle
from quire.models.mixture import extra_layers, grouped_routing, mixture
from quire.weights.names import EXPERT_STACKS, GATE_UP, QKV, NameRules


class Glm4MoeForCausalLM(DecoderForCausalLM):
    """Hugging Face's `Glm4MoeForCausalLM`."""

    NAME_RULES: ClassVar[NameRules] = NameRules(
        merges=(QKV, GATE_UP),
        substitutions=((r"\.shared_experts\.", ".shared_expert."),),
        stacks=EXPERT_STACKS,
        ignore=(r".*\.rotary_emb\.inv_freq",),
    )

    @classmethod
    def rules(cls, shape: ModelShape) -> NameRules:
        """Skips the layers that predict further tokens."""
        return extra_layers(shape, cls.NAME_RULES)

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """A mixture from layer `first_k_dense_replace` on."""
        normalise = bool(shape.raw.get("norm_topk_prob", True))
        size = whole(shape, "moe_intermediate_size")
        mlp = mixture(
            shape,
            grouped_routing(shape, normalise, score="sigmoid", group_score="top2"),
            size,
            range(whole(shape, "first_k_dense_replace", 0, least=0)),
            shared_size=size * whole(shape, "n_shared_experts", 0, least=0),
            correction_bias=True,
        )
        return DecoderStyle(
            qkv_bias=shape.attention_bias,
            qk_norm="head" if shape.raw.get("use_qk_norm") else "",
            ropes={FULL: Rope.of(shape)},
            mlp=mlp,
        )
