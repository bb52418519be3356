"""Token embedding. Knows no family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.kernels.pages import weight_memory
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.module import Module
from quire.layers.parameter import KeptForm, Parameter, Parameters


class Embedding(Module):
    """Ids `[T] -> [T, H]`."""

    def __init__(self, context: LayerContext, vocab_size: int, size: int) -> None:
        self._ops = context.ops
        self._shape = (vocab_size, size)
        self._weight: Tensor

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Look up rows."""
        return self._ops.embedding(input_ids, self._weight)

    def fused(self) -> Tensor:
        """The loaded rows `[V, H]`, for operations over several layers."""
        return self._weight

    def own_parameters(self) -> Parameters:
        """`weight`."""
        kept = KeptForm(self._keep, self._restore)
        return {"weight": Parameter(self._shape, self._load, kept=kept)}

    def _load(self, tensor: Tensor) -> None:
        self._weight = weight_memory.copy(tensor)

    def _keep(self) -> Tensor:
        return self._weight

    def _restore(self, kept: Tensor) -> None:
        self._weight = kept


class TiedEmbedding(Module):
    """Ids `[T] -> [T, H]` out of a linear layer's weight: the language-model head's, so that one
    copy serves both, or one that is kept as linear layers are."""

    def __init__(self, head: Linear, dtype: torch.dtype) -> None:
        self.head = self._head = head
        self._dtype = dtype

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Look up rows."""
        return self._head.rows(input_ids, self._dtype)

    def fused(self) -> Any:
        """See `Linear.prepared`."""
        return self._head.prepared

    def own_parameters(self) -> Parameters:
        """`weight`: the head's."""
        return {"weight": self._head.parameters()["weight"]}
