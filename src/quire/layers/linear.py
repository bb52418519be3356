"""A linear layer, possibly several side by side in one weight. Knows no family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.layers.context import LayerContext
from quire.layers.linear_method import LinearMethod
from quire.layers.module import Module, note_change
from quire.layers.parameter import Parameters


class Linear(Module):
    """`[T, K] -> [T, N]`, by the method that the model's weight format has for this layer."""

    def __init__(
        self,
        context: LayerContext,
        in_features: int,
        out_features: int | tuple[int, ...],
        bias: bool,
        *,
        gated: bool = False,
        keep: str | None = None,
        leaves: int = 1,
    ) -> None:
        """Several `out_features` stand for layers whose rows are stacked in that order.

        Args:
            context: Of this layer.
            in_features: K.
            out_features: N, or its parts.
            bias: Whether there is one.
            gated: The two parts are gate and up, for `gated`.
            keep: Results live in memory of this name until the next layer of the name is
                called. For what does not outlive its own layer of the model.
            leaves: Parts of K that are summed on their own, then added as a tree: for a layer
                whose K tensor-parallel ranks would cut (`quire.config.leaves`).
        """
        parts = (out_features,) if isinstance(out_features, int) else out_features
        self._keep = keep
        self.use(context.linear_method(in_features, parts, bias, gated, leaves))

    def use(self, method: LinearMethod) -> None:
        """Compute with this method from now on: the one of the checkpoint, or one around it."""
        self.method = method
        # Bound once: a step asks many layers, and each look-up counts.
        self._apply, self.likeliest, self.rows = method.apply, method.likeliest, method.rows
        note_change()

    def __call__(
        self, x: Tensor, out_dtype: torch.dtype | None = None, keep: str | None = None
    ) -> Tensor:
        """Apply to `[T, K]`; the result has the type of `x` unless `out_dtype` says otherwise.

        `keep` stands in for the layer's own one.
        """
        return self._apply(x, out_dtype, keep or self._keep)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """`activation(gate) * up`, rounded once: `[T, N / 2]`."""
        return self.method.gated(x, activation, self._keep)

    @property
    def prepared(self) -> Any:
        """The loaded weight for operations over several layers; `None` if its method keeps it in a
        way that those do not read."""
        return self.method.prepared

    def own_parameters(self) -> Parameters:
        """Those of the method: `weight`, perhaps `bias` and others."""
        return self.method.parameters()
