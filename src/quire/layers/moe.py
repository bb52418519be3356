"""The mixture-of-experts layer that all such families share: router, experts, shared expert.

What families do differently is data (`MoEStyle`). Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.config.leaves import inner_leaves
from quire.errors import ModelLoadError
from quire.kernels.moe import ExpertWeights, Routing
from quire.layers.activation import activation
from quire.layers.context import DEFAULT, LayerContext
from quire.layers.linear import Linear
from quire.layers.module import MLPBlock, Module, ModuleList
from quire.layers.parameter import Parameter, Parameters


@dataclass(frozen=True, slots=True)
class MoEStyle:
    """A mixture layer as its differences."""

    routing: Routing
    expert_size: int
    """Inner size of a routed expert."""
    expert_bias: bool = False
    router_bias: bool = False
    """Bias of the router's logits."""
    correction_bias: bool = False
    """A bias that counts in the choice only (`e_score_correction_bias`)."""
    shared_size: int = 0
    """Inner size of the expert that every token visits; 0: there is none."""
    shared_gate: bool = False
    """The shared expert is weighed by a sigmoid of one logit."""
    activation: Callable[[Tensor], Tensor] | None = None
    """From gate and up side by side to the inner activations, for routed and shared experts;
    `None`: silu(gate) * up."""


class Expert(Module):
    """One gated MLP: the weights; who multiplies with them is the layer's business."""

    def __init__(self, context: LayerContext, size: int, inner: int, bias: bool) -> None:
        self._gate_up_proj = Linear(context.at("gate_up_proj"), size, (inner, inner), bias)
        self._down_proj = Linear(
            context.at("down_proj"), inner, size, bias, leaves=inner_leaves(inner)
        )

    @property
    def can_be_grouped(self) -> bool:
        """Whether `ops.grouped_experts` can multiply with the weights."""
        linears = (self._gate_up_proj, self._down_proj)
        return all(linear.method.for_experts for linear in linears)

    def weights(self) -> ExpertWeights:
        """Both weights, once they are loaded."""
        return ExpertWeights(self._gate_up_proj.prepared, self._down_proj.prepared)

    def __call__(self, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """`[T, H]` to float32 `[T, H]`."""
        return self._down_proj(activation(self._gate_up_proj(x)), torch.float32)

    def children(self) -> Mapping[str, Module]:
        """`gate_up_proj` and `down_proj`."""
        return {"gate_up_proj": self._gate_up_proj, "down_proj": self._down_proj}


class MoE(MLPBlock):
    """Router, routed experts and perhaps a shared one. The sum is float32, rounded once."""

    def __init__(self, hidden_size: int, style: MoEStyle, context: LayerContext = DEFAULT) -> None:
        self._ops = context.ops
        self._style = style
        self._activation = style.activation or activation(context.ops, "silu", gated=True)
        count = style.routing.num_experts
        self._gate = Linear(context.at("gate"), hidden_size, count, style.router_bias)
        self._experts = ModuleList(
            Expert(context.at(f"experts.{i}"), hidden_size, style.expert_size, style.expert_bias)
            for i in range(count)
        )
        if not all(expert.can_be_grouped for expert in self._experts):
            raise ModelLoadError(
                f"the checkpoint's weight format cannot keep experts ({context.name})"
            )
        self._weights: list[ExpertWeights] = []
        self._correction: Tensor | None = None
        self._shared: Expert | None = None
        self._shared_gate: Linear | None = None
        if style.shared_size:
            at = context.at("shared_expert")
            self._shared = Expert(at, hidden_size, style.shared_size, False)
        if style.shared_gate:
            self._shared_gate = Linear(context.at("shared_expert_gate"), hidden_size, 1, False)

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, H] -> [T, H]`."""
        ops = self._ops
        if not self._weights:
            self._weights = [expert.weights() for expert in self._experts]
        logits = self._gate(x, torch.float32)
        weights, experts = ops.route_experts(logits, self._correction, self._style.routing)
        out = ops.grouped_experts(x, weights, experts, self._weights, self._activation)
        if self._shared is not None:
            out.add_(self._shared_part(x, self._shared))
        return out.to(x.dtype)

    def weights_changed(self) -> None:
        """Some expert has another method since the last call."""
        self._weights = []

    def _shared_part(self, x: Tensor, expert: Expert) -> Tensor:
        said = expert(x, self._activation)
        if self._shared_gate is None:
            return said
        return said.div_(self._ops.exp(-self._shared_gate(x, torch.float32)).add_(1.0))

    def children(self) -> Mapping[str, Module]:
        """`gate`, `experts`, and as there are `shared_expert`, `shared_expert_gate`."""
        found: dict[str, Module] = {"gate": self._gate, "experts": self._experts}
        if self._shared is not None:
            found["shared_expert"] = self._shared
        if self._shared_gate is not None:
            found["shared_expert_gate"] = self._shared_gate
        return found

    def own_parameters(self) -> Parameters:
        """Perhaps `gate.e_score_correction_bias`."""
        if not self._style.correction_bias:
            return {}
        size = (self._style.routing.num_experts,)
        # Its differences decide close calls: never rounded to a short type.
        bias = Parameter(size, self._load_correction, dtype=torch.float32)
        return {"gate.e_score_correction_bias": bias}

    def _load_correction(self, tensor: Tensor) -> None:
        self._correction = tensor.to(torch.float32, copy=True)
