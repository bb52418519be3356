"""Mixtures of experts: from the entries of a configuration to what makes a layer's MLP.

Knows entries that several families have, no family.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container
from typing import Any

from torch import Tensor

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.kernels.dispatch import Ops
from quire.kernels.moe import Routing
from quire.layers.activation import activation, gate
from quire.layers.context import LayerContext
from quire.layers.module import MLPBlock
from quire.layers.moe import MoE, MoEStyle
from quire.models.config_entries import number, whole
from quire.models.decoder_style import DecoderStyle
from quire.models.sublayers import GatedMLP
from quire.weights.names import NameRules


def routing(shape: ModelShape, normalise: bool, **more: Any) -> Routing:
    """A token's choice among `num_local_experts` (however it is spelled).

    Raises:
        ModelLoadError: there are not enough experts or groups for it.
    """
    experts, top_k = whole(shape, "num_local_experts"), whole(shape, "num_experts_per_tok")
    choice = Routing(experts, top_k, normalise=normalise, **more)
    groups, best = choice.groups, choice.top_groups
    if experts % groups or best > groups:
        raise ModelLoadError(
            f"config.json: {experts} experts must be a multiple of n_group ({groups}), and "
            f"topk_group ({best}) at most n_group"
        )
    if choice.group_score == "top2" and experts // groups < 2:
        raise ModelLoadError(f"config.json: {groups} groups of {experts} experts hold fewer than 2")
    reached = experts // groups * best
    if top_k > reached:
        raise ModelLoadError(
            f"config.json: 'num_experts_per_tok' must be at most {reached}, the experts that a "
            f"token can reach, got {top_k}"
        )
    return choice


def grouped_routing(shape: ModelShape, normalise: bool, **more: Any) -> Routing:
    """A choice within the best groups, with a factor of the weights (DeepSeek's entries)."""
    return routing(
        shape,
        normalise,
        groups=whole(shape, "n_group", 1),
        top_groups=whole(shape, "topk_group", 1),
        scale=number(shape, "routed_scaling_factor", 1.0),
        **more,
    )


def mixture(
    shape: ModelShape,
    choice: Routing,
    expert_size: int,
    dense: Container[int] = (),
    activate: Callable[[Ops], Callable[[Tensor], Tensor]] | None = None,
    **more: Any,
) -> Callable[[LayerContext, int], MLPBlock]:
    """What makes a layer's MLP: the usual one in `dense` layers, elsewhere a mixture.

    Args:
        shape: Of the model.
        choice: A token's choice of experts.
        expert_size: Inner size of an expert.
        dense: Layers without a mixture.
        activate: Makes the experts' activation of the model's operations; `None`: that of the
            configuration, gated.
        more: Fields of `MoEStyle`.
    """
    usual = DecoderStyle(mlp_bias=shape.mlp_bias).settled(shape)
    if activate is None:
        gate(shape.hidden_act)  # an unknown name is told before anything is built
        activate = functools.partial(activation, name=shape.hidden_act, gated=True)
    make = activate
    style = MoEStyle(choice, expert_size, **more)

    def mlp(context: LayerContext, layer: int) -> MLPBlock:
        if layer in dense:
            return GatedMLP(context, shape, usual)
        own = dataclasses.replace(style, activation=make(context.ops))
        return MoE(shape.hidden_size, own, context)

    return mlp


def extra_layers(shape: ModelShape, rules: NameRules) -> NameRules:
    """`rules`, and that the layers behind the last are skipped: they predict further tokens
    (DeepSeek-V3, section 2.2)."""
    extra = whole(shape, "num_nextn_predict_layers", 0, least=0)
    skipped = [rf"model\.layers\.{shape.num_layers + i}\..*" for i in range(extra)]
    return dataclasses.replace(rules, ignore=(*rules.ignore, *skipped))
