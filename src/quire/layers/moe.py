"""The mixture-of-experts layer that all such families share: router, experts, shared expert.

What families do differently is data (`MoEStyle`). Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.config.leaves import inner_leaves
from quire.kernels.dispatch import ops
from quire.kernels.moe import ExpertWeights, Routing
from quire.layers.linear import Linear
from quire.layers.parameter import Parameter, Parameters, prefixed


def silu_gate(x: Tensor) -> Tensor:
    """silu(gate) * up."""
    return ops.silu_and_mul(x)


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
    activation: Callable[[Tensor], Tensor] = silu_gate
    """From gate and up side by side to the inner activations, for routed and shared experts."""


class Expert:
    """One gated MLP: the weights; who multiplies with them is the layer's business."""

    def __init__(self, size: int, inner: int, bias: bool) -> None:
        self._gate_up_proj = Linear(size, (inner, inner), bias)
        self._down_proj = Linear(inner, size, bias, leaves=inner_leaves(inner))

    def weights(self) -> ExpertWeights:
        """Both weights, once they are loaded."""
        return ExpertWeights(self._gate_up_proj.prepared, self._down_proj.prepared)

    def __call__(self, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """`[T, H]` to float32 `[T, H]`."""
        return self._down_proj(activation(self._gate_up_proj(x)), torch.float32)

    def parameters(self) -> Parameters:
        """`gate_up_proj.*` and `down_proj.*`."""
        return prefixed("gate_up_proj", self._gate_up_proj.parameters()) | prefixed(
            "down_proj", self._down_proj.parameters()
        )


class MoE:
    """Router, routed experts and perhaps a shared one. The sum is float32, rounded once."""

    def __init__(self, hidden_size: int, style: MoEStyle) -> None:
        self._style = style
        count = style.routing.num_experts
        self._gate = Linear(hidden_size, count, style.router_bias)
        self._experts = [
            Expert(hidden_size, style.expert_size, style.expert_bias) for _ in range(count)
        ]
        self._weights: list[ExpertWeights] = []
        self._correction: Tensor | None = None
        self._shared = Expert(hidden_size, style.shared_size, False) if style.shared_size else None
        self._shared_gate = Linear(hidden_size, 1, False) if style.shared_gate else None

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, H] -> [T, H]`."""
        style = self._style
        if not self._weights:
            self._weights = [expert.weights() for expert in self._experts]
        logits = self._gate(x, torch.float32)
        weights, experts = ops.route_experts(logits, self._correction, style.routing)
        out = ops.grouped_experts(x, weights, experts, self._weights, style.activation)
        if self._shared is not None:
            out.add_(self._shared_part(x, self._shared))
        return out.to(x.dtype)

    def _shared_part(self, x: Tensor, expert: Expert) -> Tensor:
        said = expert(x, self._style.activation)
        if self._shared_gate is None:
            return said
        return said.div_(ops.exp(-self._shared_gate(x, torch.float32)).add_(1.0))

    def parameters(self) -> Parameters:
        """`gate.*`, `experts.N.*`, and as there are `shared_expert.*`, `shared_expert_gate.*`."""
        found = prefixed("gate", self._gate.parameters())
        if self._style.correction_bias:
            size = (self._style.routing.num_experts,)
            # Its differences decide close calls: never rounded to a short type.
            found["gate.e_score_correction_bias"] = Parameter(
                size, self._load_correction, dtype=torch.float32
            )
        for i, expert in enumerate(self._experts):
            found |= prefixed(f"experts.{i}", expert.parameters())
        if self._shared is not None:
            found |= prefixed("shared_expert", self._shared.parameters())
        if self._shared_gate is not None:
            found |= prefixed("shared_expert_gate", self._shared_gate.parameters())
        return found

    def _load_correction(self, tensor: Tensor) -> None:
        self._correction = tensor.to(torch.float32, copy=True)
