"""A linear layer, possibly several side by side in one weight. Knows no family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.layers.context import LayerContext
from quire.layers.module import Module
from quire.layers.parameter import Parameter, Parameters


class Linear(Module):
    """`[T, K] -> [T, N]`; the weight is prepared once for the chosen kernels, then fixed."""

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
        self._ops = context.ops
        self._parts = (out_features,) if isinstance(out_features, int) else out_features
        self._shape = (sum(self._parts), in_features)
        self._has_bias = bias
        self._weight: tuple[list[Tensor], torch.dtype] | None = None
        self._bias: Tensor | None = None
        self._gated = gated
        self._keep = keep
        self._leaves = leaves
        self._prepared: Any = None

    def __call__(
        self, x: Tensor, out_dtype: torch.dtype | None = None, keep: str | None = None
    ) -> Tensor:
        """Apply to `[T, K]`; the result has the type of `x` unless `out_dtype` says otherwise.

        `keep` stands in for the layer's own one.
        """
        return self._ops.linear(x, self._prepared, out_dtype, keep or self._keep)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """`activation(gate) * up`, rounded once: `[T, N / 2]`."""
        return self._ops.gated_linear(x, self._prepared, activation, self._keep)

    def likeliest(self, x: Tensor) -> Tensor:
        """The column of the largest number of each row of the float32 result: int64 `[T]`.

        -1 where some number of a row is not finite.
        """
        return self._ops.likeliest(x, self._prepared)

    @property
    def prepared(self) -> Any:
        """The loaded weight as `ops.prepare_linear` made it, for operations over several layers."""
        assert self._prepared is not None, "the weight is not loaded yet"
        return self._prepared

    def own_parameters(self) -> Parameters:
        """`weight` and perhaps `bias`."""
        parts = self._parts if len(self._parts) > 1 else ()
        found = {
            "weight": Parameter(self._shape, self._load_weight, parts, load_parts=self._load_parts)
        }
        if self._has_bias:
            found["bias"] = Parameter(self._shape[:1], self._load_bias, parts)
        return found

    def _load_weight(self, tensor: Tensor) -> None:
        self._load_parts([tensor], tensor.dtype)

    def _load_parts(self, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._weight = list(parts), dtype
        self._prepare()

    def _load_bias(self, tensor: Tensor) -> None:
        self._bias = tensor
        self._prepare()

    def _prepare(self) -> None:
        """Once weight and bias are there. The checkpoint's tensors are let go: they may be large
        or memory-mapped."""
        if self._weight is None or (self._has_bias and self._bias is None):
            return
        parts, dtype = self._weight
        self._prepared = self._ops.prepare_linear(
            parts, self._bias, gated=self._gated, dtype=dtype, leaves=self._leaves
        )
        self._weight = self._bias = None
