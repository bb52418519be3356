"""Token embedding. Knows no family."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.dispatch import ops
from quire.layers.parameter import Parameter, Parameters


class Embedding:
    """Ids `[T] -> [T, H]`."""

    def __init__(self, vocab_size: int, size: int) -> None:
        self._shape = (vocab_size, size)
        self._weight: Tensor

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Look up rows."""
        return ops.embedding(input_ids, self._weight)

    def parameters(self) -> Parameters:
        """`weight`."""
        return {"weight": Parameter(self._shape, self._load)}

    def _load(self, tensor: Tensor) -> None:
        self._weight = tensor.clone()
