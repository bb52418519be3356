"""A linear layer, possibly several side by side in one weight. Knows no family."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from quire.kernels.dispatch import ops
from quire.layers.parameter import Parameter, Parameters


class Linear:
    """`[T, K] -> [T, N]`; the weight is prepared once for the chosen kernels, then fixed."""

    def __init__(self, in_features: int, out_features: int | tuple[int, ...], bias: bool) -> None:
        """Several `out_features` stand for layers whose rows are stacked in that order."""
        self._parts = (out_features,) if isinstance(out_features, int) else out_features
        self._shape = (sum(self._parts), in_features)
        self._waiting: dict[str, Tensor | None] = {"weight": None}
        if bias:
            self._waiting["bias"] = None
        self._prepared: Any = None

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Apply to `[T, K]`; the result has the type of `x` unless `out_dtype` says otherwise."""
        return ops.linear(x, self._prepared, out_dtype)

    @property
    def prepared(self) -> Any:
        """The loaded weight as `ops.prepare_linear` made it, for operations over several layers."""
        assert self._prepared is not None, "the weight is not loaded yet"
        return self._prepared

    def parameters(self) -> Parameters:
        """`weight` and perhaps `bias`."""
        parts = self._parts if len(self._parts) > 1 else ()
        shapes = {"weight": self._shape, "bias": self._shape[:1]}
        return {
            name: Parameter(shapes[name], functools.partial(self._load, name), parts)
            for name in self._waiting
        }

    def _load(self, name: str, tensor: Tensor) -> None:
        self._waiting[name] = tensor.contiguous()
        if all(value is not None for value in self._waiting.values()):
            self._prepared = ops.prepare_linear(self._waiting["weight"], self._waiting.get("bias"))
            self._waiting.clear()  # the checkpoint's tensors may be large or memory-mapped
