"""Norms with their weights, as a table. Knows no family."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from quire.kernels.decoder import NormParts
from quire.layers.context import LayerContext
from quire.layers.module import Module
from quire.layers.parameter import Parameter, Parameters


class Norm(Module):
    """`[..., H] -> [..., H]`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of `x`."""
        raise NotImplementedError

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Norm of `x + residual`, and that sum."""
        total = x + residual
        return self(total), total

    def parts(self) -> NormParts | None:
        """The loaded norm as data; `None` if that cannot say it."""
        return None


class RMSNorm(Norm):
    """Root-mean-square norm."""

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        self._ops = context.ops
        self._size = size
        self._eps = eps
        self._weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of `x`."""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Norm of `x + residual`, and that sum."""
        return self._ops.rms_norm_add(x, residual, self._weight, self._eps)

    def parts(self) -> NormParts:
        """The loaded norm as data."""
        return NormParts("rms", self._weight, None, self._eps)

    def own_parameters(self) -> Parameters:
        """`weight`."""
        return {"weight": Parameter((self._size,), self._load)}

    def _load(self, tensor: Tensor) -> None:
        self._weight = tensor.clone()


class WideRMSNorm(Norm):
    """Root-mean-square norm that is rounded after the weight, which may be kept as w - 1."""

    def __init__(self, context: LayerContext, size: int, eps: float, offset: float = 0.0) -> None:
        """`offset` is added to the checkpoint's weight, in float32."""
        self._ops = context.ops
        self._size, self._eps, self._offset = size, eps, offset
        self._weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of `x`."""
        return self._ops.rms_norm_wide(x, self._weight, self._eps)

    def parts(self) -> NormParts:
        """The loaded norm as data."""
        return NormParts("rms_wide", self._weight, None, self._eps)

    def own_parameters(self) -> Parameters:
        """`weight`."""
        return {"weight": Parameter((self._size,), self._load, dtype=torch.float32)}

    def _load(self, tensor: Tensor) -> None:
        self._weight = tensor + self._offset


class LayerNorm(Norm):
    """Layer norm, with or without weight and bias; one for all heads or one per head."""

    def __init__(
        self,
        context: LayerContext,
        size: int | tuple[int, int],
        eps: float,
        bias: bool = True,
        weight: bool = True,
    ) -> None:
        """A `size` of (heads, head_dim) stands for a norm with weights of its own per head."""
        self._ops = context.ops
        self._shape = (size,) if isinstance(size, int) else size
        self._eps = eps
        self._tensors: dict[str, Tensor] = {}
        self._names = ("weight",) * weight + ("bias",) * bias

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of `x`."""
        return self._ops.layer_norm(
            x, self._tensors.get("weight"), self._tensors.get("bias"), self._eps
        )

    def parts(self) -> NormParts:
        """The loaded norm as data."""
        return NormParts("layer", self._tensors.get("weight"), self._tensors.get("bias"), self._eps)

    def own_parameters(self) -> Parameters:
        """What of `weight` and `bias` there is."""
        parts = (1,) * self._shape[0] if len(self._shape) > 1 else ()
        return {
            name: Parameter(self._shape, functools.partial(self._load, name), parts)
            for name in self._names
        }

    def _load(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor.clone()


NORMS: Final[dict[str, Callable[[LayerContext, Any, float], Norm]]] = {
    "rms": RMSNorm,
    "rms_wide": WideRMSNorm,
    "rms_unit": functools.partial(WideRMSNorm, offset=1.0),
    "layer": LayerNorm,
    "layer_no_bias": functools.partial(LayerNorm, bias=False),
    "layer_bare": functools.partial(LayerNorm, weight=False, bias=False),
}
"""Kinds of norms: `rms_wide` rounds after the weight, `rms_unit` keeps it as w - 1 as well."""
