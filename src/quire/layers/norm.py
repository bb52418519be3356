"""Root-mean-square norm with its weight. Knows no family."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.dispatch import ops
from quire.layers.parameter import Parameter, Parameters


class RMSNorm:
    """`[T, H] -> [T, H]`."""

    def __init__(self, size: int, eps: float) -> None:
        self._size = size
        self._eps = eps
        self._weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of `x`."""
        return ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Norm of `x + residual`, and that sum."""
        return ops.rms_norm_add(x, residual, self._weight, self._eps)

    def parameters(self) -> Parameters:
        """`weight`."""
        return {"weight": Parameter((self._size,), self._load)}

    def _load(self, tensor: Tensor) -> None:
        self._weight = tensor.clone()
