"""What a layer is told when it is built, besides its own sizes.

A model passes one context down its tree; each layer takes from it what it needs and gives its
children one under their names. So nothing that may differ between two models of one process is
read from a global. Knows no family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.kernels.dispatch import Ops
from quire.kernels.dispatch import ops as default


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Where a layer stands, and what it computes with."""

    ops: Ops = default
    """The operations of the model; by default those of the process."""
    name: str = ""
    """The layer's own name in the model: `model.layers.0.self_attn.qkv_proj`."""

    def at(self, name: str) -> LayerContext:
        """The context of a child."""
        return replace(self, name=f"{self.name}.{name}" if self.name else name)


DEFAULT = LayerContext()
"""For a layer without a model: on the process's default kernels."""
