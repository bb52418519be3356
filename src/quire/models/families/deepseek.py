"""DeepSeek V2 and V3 (also R1 and V2-Lite): latent attention, grouped routing, shared experts.

Attention is that of `models/mla.py`. From layer `first_k_dense_replace` on, the MLP is a mixture
whose router scores by softmax (V2) or by sigmoid with a correction bias (V3).
"""

from __future__ import annotations

from typing import ClassVar

from quire.config.shape import LayerKV, ModelShape
from quire.errors import ModelLoadError
from quire.kernels.moe import Routing
from quire.layers.rotary import Rope, yarn_mscale
from quire.models.config_entries import number, whole
from quire.models.decoder import DecoderForCausalLM
from quire.models.decoder_style import FULL, DecoderStyle
from quire.models.mixture import extra_layers, grouped_routing, mixture, routing
from quire.models.mla import LatentAttention, MLASizes
from quire.weights.names import EXPERT_STACKS, GATE_UP, NameRules


class DeepseekV2ForCausalLM(DecoderForCausalLM):
    """Hugging Face's `DeepseekV2ForCausalLM`."""

    NAME_RULES: ClassVar[NameRules] = NameRules(
        merges=(GATE_UP,),
        substitutions=((r"\.shared_experts\.", ".shared_expert."),),
        stacks=EXPERT_STACKS,
        ignore=(r".*\.rotary_emb\.inv_freq",),
    )

    @classmethod
    def rules(cls, shape: ModelShape) -> NameRules:
        """Layers behind the last, which predict further tokens, are skipped."""
        return extra_layers(shape, cls.NAME_RULES)

    @classmethod
    def kv_layers(cls, shape: ModelShape) -> tuple[LayerKV, ...]:
        """One latent per token and layer."""
        return (cls._sizes(shape).layer_kv(),) * shape.num_layers

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Latent attention everywhere; a mixture after the first layers."""
        sizes = cls._sizes(shape)
        first = whole(shape, "first_k_dense_replace", 0, least=0)
        every = whole(shape, "moe_layer_freq", 1)
        size = whole(shape, "moe_intermediate_size")
        choice = cls._routing(shape)
        mlp = mixture(
            shape,
            choice,
            size,
            {i for i in range(shape.num_layers) if i < first or i % every},
            shared_size=size * whole(shape, "n_shared_experts", 0, least=0),
            correction_bias=choice.score == "sigmoid",
        )
        return DecoderStyle(
            attention=lambda context, layer: LatentAttention(context, sizes),
            mlp=mlp,
            ropes={FULL: Rope.of(shape, dim=sizes.qk_rope_head_dim)},
        )

    @classmethod
    def _sizes(cls, shape: ModelShape) -> MLASizes:
        raw = shape.raw
        nope, rope = whole(shape, "qk_nope_head_dim"), whole(shape, "qk_rope_head_dim")
        rank = raw.get("q_lora_rank")
        return MLASizes(
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            q_lora_rank=None if rank is None else whole(shape, "q_lora_rank"),
            kv_lora_rank=whole(shape, "kv_lora_rank"),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            v_head_dim=whole(shape, "v_head_dim"),
            scale=(nope + rope) ** -0.5 * _growth(shape) ** 2,
            bias=shape.attention_bias,
            interleaved=bool(raw.get("rope_interleave", True)),
        )

    @classmethod
    def _routing(cls, shape: ModelShape) -> Routing:
        _expect(shape, "topk_method", "greedy", "group_limited_greedy")
        _expect(shape, "scoring_func", "softmax")
        _expect(shape, "norm_topk_prob", False)
        if shape.raw.get("topk_method") == "group_limited_greedy":
            return grouped_routing(shape, normalise=False)
        scale = number(shape, "routed_scaling_factor", 1.0)
        return routing(shape, normalise=False, scale=scale)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Hugging Face's `DeepseekV3ForCausalLM`."""

    @classmethod
    def _routing(cls, shape: ModelShape) -> Routing:
        _expect(shape, "topk_method", "noaux_tc")
        _expect(shape, "scoring_func", "sigmoid")
        normalise = bool(shape.raw.get("norm_topk_prob", True))
        return grouped_routing(shape, normalise, score="sigmoid", group_score="top2")


def _growth(shape: ModelShape) -> float:
    """Factor of queries and of keys in an extended context (`mscale_all_dim`)."""
    scaling = shape.rope_scaling or {}
    all_dim = scaling.get("mscale_all_dim") or 0
    return yarn_mscale(float(scaling.get("factor") or 1), float(all_dim)) if all_dim else 1.0


def _expect(shape: ModelShape, name: str, *known: object) -> None:
    """Refuse an entry that is given and says something else."""
    value = shape.raw.get(name)
    if value is not None and value not in known:
        wanted = " or ".join(repr(item) for item in known)
        raise ModelLoadError(
            f"config.json: {name!r} must be {wanted} for {shape.architecture}, got {value!r:.60}"
        )
