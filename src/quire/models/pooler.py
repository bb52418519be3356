"""Pooling: hidden states of a prompt become one vector, class probabilities, or a vector per token.

Everything is computed in float32, per request and in a fixed order, so that a result does not
depend on what else is in the batch. Knows no family and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from quire.checkpoint.sentence_transformers import DenseModule
from quire.config.pooler_spec import PoolerSpec
from quire.kernels.dispatch import Ops
from quire.kernels.exact import tree_sum
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.module import Module
from quire.models.encoder import ClassificationHead, activation
from quire.params import PoolingParams

_SHORTEST: Final = 1e-12
"""Vectors shorter than this are divided by it instead of their length: a zero vector stays zero."""

POOLINGS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "cls": lambda rows: rows[0],
    "last": lambda rows: rows[-1],
    "max": lambda rows: rows.amax(0),
    "mean": lambda rows: tree_sum(rows, 0).div_(rows.shape[0]),
    "mean_sqrt_len": lambda rows: tree_sum(rows, 0).div_(rows.shape[0] ** 0.5),
}
"""Name to function from `[n, H]` float32, all tokens of a prompt, to `[H]`. `last` needs only the
last token."""


def normalize(rows: Tensor) -> Tensor:
    """Rows `[n, H]` scaled to length 1."""
    lengths = tree_sum(rows * rows).sqrt_().clamp_min_(_SHORTEST)
    return rows / lengths.unsqueeze(-1)


CLASS_ACTIVATIONS: Final[dict[str, Callable[[Ops, Tensor], Tensor]]] = {
    "none": lambda ops, logits: logits,
    "sigmoid": lambda ops, logits: 1.0 / (1.0 + ops.exp(-logits)),
    "softmax": lambda ops, logits: ops.exp(ops.log_softmax(logits)),
}
"""Float32 logits `[R, labels]` to scores."""


class DenseLayer(Module):
    """A linear layer of sentence-transformers, with its activation."""

    def __init__(self, context: LayerContext, spec: DenseModule) -> None:
        self._linear = Linear(context.at("linear"), spec.in_features, spec.out_features, spec.bias)
        self._act = activation(context.ops, spec.activation)

    def __call__(self, pooled: Tensor) -> Tensor:
        """`[R, in] -> [R, out]`, float32."""
        return self._act(self._linear(pooled))

    def children(self) -> Mapping[str, Module]:
        """Under the names of sentence-transformers."""
        return {"linear": self._linear}


class Pooler:
    """Pools as `spec` says, with the layers that come after."""

    def __init__(
        self, context: LayerContext, spec: PoolerSpec, head: ClassificationHead | None
    ) -> None:
        self._ops = context.ops
        self.spec = spec
        self.head = head
        self.dense = [DenseLayer(context, dense) for dense in spec.dense]

    def __call__(self, hidden: Sequence[Tensor], params: Sequence[PoolingParams]) -> list[Tensor]:
        """Hidden states `[n, H]` of each request to float32 `[size]`, or `[n, size]`.

        Args:
            hidden: All tokens of each prompt; with `last` pooling at least the last.
            params: One per request.
        """
        pool = POOLINGS[self.spec.pooling]
        wide = [rows.to(torch.float32) for rows in hidden]
        whole = [p.task == "token_embed" for p in params]
        pooled = [pool(rows) for rows, all_of_it in zip(wide, whole, strict=True) if not all_of_it]
        vectors = iter(self._after(torch.stack(pooled)) if pooled else ())
        return [
            self._finish(rows if all_of_it else next(vectors).unsqueeze(0), p, all_of_it)
            for rows, all_of_it, p in zip(wide, whole, params, strict=True)
        ]

    def _after(self, pooled: Tensor) -> Tensor:
        """What follows pooling in the model: dense layers, or the classification head."""
        if self.head is not None:
            return self.head(pooled).to(torch.float32)
        for dense in self.dense:
            pooled = dense(pooled)
        return pooled

    def _finish(self, rows: Tensor, params: PoolingParams, all_of_it: bool) -> Tensor:
        """Cut and scaled as the request wants: `[n, size]`, or `[size]` for one vector."""
        wanted = params.use_activation
        wanted = self.spec.use_activation if wanted is None else wanted
        if self.head is not None:
            rows = CLASS_ACTIVATIONS[self.spec.activation](self._ops, rows) if wanted else rows
        else:
            rows = rows[:, : params.dimensions or self.spec.dimensions]
            rows = normalize(rows) if wanted else rows
        return rows if all_of_it else rows[0]
