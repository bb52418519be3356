"""What a layer is told when it is built, besides its own sizes.

A model passes one context down its tree; each layer takes from it what it needs and gives its
children one under their names. So nothing that may differ between two models of one process is
read from a global. What ranks of a model will have to know of each other belongs here, too. Knows
no family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from quire.kernels.dispatch import Ops
from quire.kernels.dispatch import ops as default
from quire.layers.linear_method import PLAIN, LinearMethod, LinearSpec, WeightFormat


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Where a layer stands, and what it computes with."""

    ops: Ops = default
    """The operations of the model; by default those of the process."""
    dtype: torch.dtype = torch.float32
    """Type of the model's activations."""
    weights: WeightFormat = PLAIN
    """How the checkpoint keeps linear layers."""
    name: str = ""
    """The layer's own name in the model: `model.layers.0.self_attn.qkv_proj`."""

    def at(self, name: str) -> LayerContext:
        """The context of a child."""
        return replace(self, name=f"{self.name}.{name}" if self.name else name)

    def linear_method(
        self, in_features: int, parts: tuple[int, ...], bias: bool, gated: bool, leaves: int
    ) -> LinearMethod:
        """A new method for the linear layer that stands here.

        Raises:
            ModelLoadError: the checkpoint's format has none for it.
        """
        sizes = (in_features, parts, bias, gated, leaves)
        return self.weights.linear_method(LinearSpec(self.name, self.ops, self.dtype, *sizes))


DEFAULT: Final = LayerContext()
"""For a layer without a model: plain weights, on the process's default kernels."""
